"""Adapters that name fused modules and adapters that name their parts, on checkpoints of either kind.

One model in two folders: Phi-3 with `qkv_proj` and `gate_up_proj`, and Llama with the same weights, split. What was
trained on one is served on both, and must answer as transformers + PEFT do on the model that it was trained on.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from minivllm.gpu.slot_writer import SlotWriter
from tests.oracles.peft import Oracle
from tests.worlds.adapters import save_adapter
from tests.worlds.engines import TinyWorld
from tests.worlds.models import SIZES, save_base, token_ids
from tests.worlds.settings import BACKENDS, EACH_BACKEND

# Trained on Phi-3: one A, and one B as tall as the whole module.
FUSED = {
    "fused": {"r": 4, "lora_alpha": 9, "target_modules": ["qkv_proj", "gate_up_proj"]},
    "fused, everything": {
        "r": 6,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"layers.1.self_attn.qkv_proj": 3, "gate_up_proj": 7},
        "alpha_pattern": {"layers.0.mlp.gate_up_proj": 20, "qkv_proj": 4},
    },
    "fused, one module": {"r": 2, "lora_alpha": 6, "target_modules": r".*layers\.0\.self_attn\.qkv_proj"},
    "fused, bias": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["qkv_proj", "gate_up_proj"],
        "lora_bias": True,
    },
}
# Trained on Llama: A and B of their own for every part, or for some.
SPLIT = {
    "some parts": {"r": 5, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "every part": {
        "r": 4,
        "lora_alpha": 7,
        "target_modules": "all-linear",
        "rank_pattern": {"k_proj": 2, "layers.1.mlp.gate_proj": 8, "layers.0.self_attn.q_proj": 6},
        "alpha_pattern": {"gate_proj": 13, "layers.1.self_attn.v_proj": 2},
    },
    "a part with a bias": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["k_proj", "gate_proj"],
        "lora_bias": True,
    },
}
FORMS = ["fused", "split"]
OPTIONS = {"max_loras": 3, "max_cpu_loras": 8, "bias_enabled": True}

HEADS, KV_HEADS = SIZES["num_attention_heads"], 2
HEAD = SIZES["hidden_size"] // HEADS
# Fused module -> its parts and their heights.
PARTS = {
    "qkv_proj": {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD},
    "gate_up_proj": {"gate_proj": SIZES["intermediate_size"], "up_proj": SIZES["intermediate_size"]},
}


def save_split(folder, fused_base):
    """Llama with the weights of a Phi-3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    phi3 = json.loads((fused_base / "config.json").read_text())
    same = {name: phi3[name] for name in (*SIZES, "num_key_value_heads", "rms_norm_eps", "rope_parameters")}
    model = LlamaForCausalLM(LlamaConfig(**same, eos_token_id=2, bos_token_id=1)).double()
    weights = {}
    for name, weight in load_file(fused_base / "model.safetensors").items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        parts = PARTS.get(module, {module: len(weight)})
        for part, rows in zip(parts, weight.split(list(parts.values()))):
            weights[name.replace(module, part)] = rows
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    return folder


class TwoForms(TinyWorld):
    """The two folders, and adapters that were trained on one of them.

    bases        "fused" and "split" -> the folder
    trained_on   adapter -> "fused" or "split"
    """

    def __init__(self, folder):
        self.folder, self.names = folder, [*FUSED, *SPLIT]
        fused = save_base(folder / "base", "phi3-fused")
        self.bases = {"fused": fused, "split": save_split(folder / "split-base", fused)}
        self.trained_on = {**dict.fromkeys(FUSED, "fused"), **dict.fromkeys(SPLIT, "split")}
        for seed, (name, config) in enumerate({**FUSED, **SPLIT}.items()):
            save_adapter(folder / name, self.bases[self.trained_on[name]], seed, **config)
        self._oracles_of = {}

    def make_oracle(self, name):
        oracle = Oracle(self.bases[self.trained_on.get(name, "fused")])
        if name is not None:
            oracle.load(name, self.path(name))
        return oracle

    def engine(self, form="fused", **options):
        self.base = self.bases[form]
        return super().engine(skip_tokenizer_init=True, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return TwoForms(tmp_path_factory.mktemp("forms"))


def test_both_folders_are_one_model_and_every_adapter_moves_it(world):
    """Else agreement would prove nothing."""
    prompt = token_ids(12, seed=3)
    base = world.oracle_of(None).logits(None, [prompt])

    split = Oracle(world.bases["split"]).logits(None, [prompt])

    assert (base - split).abs().max() < 1e-12 * base.abs().max()
    moved = [world.oracle_of(name).logits(name, [prompt]) - base for name in world.names]
    assert all(difference.abs().max() > 0.1 * base.abs().max() for difference in moved)


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("form", FORMS)
def test_a_mixed_batch_of_all_gives_each_request_what_peft_gives_it(world, form, backend):
    """More adapters than slots, and base rows among them."""
    engine = world.engine(form, punica_backend=backend)

    world.assert_serves(engine, world.workload(rows=2), max_tokens=6, tolerance=BACKENDS[backend])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_left_in_a_slot_that_held_the_other_kind(world, form):
    engine = world.engine(form, max_loras=1)

    for name in ["fused, everything", "some parts", "fused", "a part with a bias", "fused, one module", None]:
        world.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])], max_tokens=4)


def test_slots_that_a_gpus_writer_fills_are_the_same(world):
    """The parts of a fused adapter have one A."""
    engine = world.engine("split", max_loras=1)
    manager = engine.adapters.manager
    manager.slot_writer = SlotWriter(manager.wrapped, "cpu")

    for name in [*world.names, *reversed(world.names)]:
        world.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])], max_tokens=2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "target_modules"),
    [("fused", ["q_proj", "gate_up_proj"]), ("some parts", ["qkv_proj", "up_proj"])],
)
def test_the_servers_targets_may_be_of_the_other_kind(world, form, name, target_modules):
    engine = world.engine(form, target_modules=target_modules)

    world.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])])


@pytest.mark.parametrize("name", ["fused", "fused, everything", "fused, bias"])
def test_a_packed_adapter_has_the_whole_a_in_every_part_and_its_rows_of_b(world, name):
    """Against the file and PEFT's scaling."""
    engine = world.engine("split")
    engine.add_lora(world.request(name))

    lora = engine.adapters.manager.get_adapter(world.names.index(name) + 1)

    file = load_file(world.path(name) / "adapter_model.safetensors")
    prefix = "model.layers.1.self_attn"
    peft = world.oracle_of(name).peft.get_submodule(f"base_model.model.{prefix}.qkv_proj")
    packed = lora.get_lora(f"{prefix}.qkv_proj")
    rows = [slice(0, 48), slice(48, 72), slice(72, 96)]
    lora_a, lora_b = (file[f"base_model.model.{prefix}.qkv_proj.lora_{side}.weight"] for side in "AB")
    for i, part in enumerate(rows):
        assert torch.equal(packed.lora_a[i], lora_a)
        assert torch.allclose(packed.lora_b[i], lora_b[part] * peft.scaling[name], rtol=1e-14)
