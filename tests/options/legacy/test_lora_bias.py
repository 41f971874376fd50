"""Adapters with a bias on B (PEFT's `lora_bias`), in one batch with others: as transformers + PEFT has them."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.gpu.slot_writer import SlotWriter
from tests.worlds.engines import (
    TinyWorld,
    assert_logits,
    crossed,
    greedy,
    made_once,
    run,
    snapshot,
    watch_logits,
)
from tests.worlds.settings import BACKENDS, EACH_BACKEND, OF_OPTIONS

ADAPTERS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "bias": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj", "o_proj"], "lora_bias": True},
    "rank-stabilised": {
        "r": 8,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": "all-linear",
        "lora_bias": True,
    },
    "patterns": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "k_proj", "down_proj", "up_proj"],
        "rank_pattern": {"k_proj": 8, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"down_proj": 13, "layers.0.self_attn.k_proj": 1.5},
        "lora_bias": True,
    },
}
# The checkpoint's qkv_proj and gate_up_proj are one matrix each, and so are their adapters' B and bias.
FUSED = {
    "fused": {"r": 4, "lora_alpha": 7, "target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True},
    "fused, plain": {"r": 3, "lora_alpha": 9, "target_modules": ["qkv_proj", "down_proj"]},
}
VARIANTS = {"llama-llama3-rope": ADAPTERS, "llama-linear-rope-biases-tied": ADAPTERS, "phi3-fused": FUSED}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


class BiasWorld(TinyWorld):
    def __init__(self, folder, variant):
        super().__init__(folder, variant, VARIANTS[variant])
        if "patterns" in self.names:
            # PEFT takes a bias that is not in the file for zeros: here k_proj's, beside q_proj's in one layer.
            edit(self.path("patterns"), **{f"{Q.replace('q_proj', 'k_proj')}.lora_B.bias": None})


made = partial(made_once, BiasWorld)


@pytest.fixture
def llama(tmp_path_factory):
    return made(tmp_path_factory)


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of adapter "bias" to spoil."""
    return shutil.copytree(llama.path("bias"), tmp_path / "spoilt")


def edit(folder, **changes):
    """Tensors put into the adapter's weights; None takes one out."""
    path = folder / "adapter_model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(("variant", "setting"), crossed(VARIANTS, OF_OPTIONS))
def test_a_mixed_batch_gives_each_request_what_peft_gives_it(tmp_path_factory, variant, setting):
    world = made(tmp_path_factory, variant)
    engine = world.engine(bias_enabled=True, **OF_OPTIONS[setting])

    world.assert_serves(engine, world.workload())


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize(
    "variant", ["llama-llama3-rope", pytest.param("phi3-fused", marks=pytest.mark.nightly)]
)
def test_every_backend_gives_them(variant, backend, tmp_path_factory):
    world = made(tmp_path_factory, variant)
    engine = world.engine(bias_enabled=True, max_loras=4, punica_backend=backend)

    world.assert_serves(engine, world.workload(1, rows=2), max_tokens=4, tolerance=BACKENDS[backend])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stored_in_16_bits_are_converted_before_they_are_scaled(llama, tmp_path, dtype):
    """As PEFT does it: a product in 16 bits would be rounded once more, and move logits and tokens."""
    folder = shutil.copytree(llama.path("bias"), tmp_path / "16 bits")
    edit(folder, **{name: t.to(dtype) for name, t in load_file(folder / "adapter_model.safetensors").items()})
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 10', '"lora_alpha": 11'))
    oracle, prompt = llama.make_oracle(None), [5, 9, 60, 3]
    oracle.load("16 bits", folder)
    engine, params = llama.engine(bias_enabled=True), greedy(1)

    with watch_logits(engine, [params]) as seen:
        lora_request = llama.request("bias", lora_path=str(folder))
        engine.add_request("a", prompt, params, lora_request=lora_request)
        run(engine)

    expected = oracle.logits("16 bits", [prompt])[0, -1:]
    assert_logits(torch.stack(seen[0]), expected, 1e-10, f"{dtype}")


def test_a_slot_that_had_a_bias_serves_an_adapter_without(llama):
    engine = llama.engine(bias_enabled=True, max_loras=1)

    for name in ["bias", "plain", "rank-stabilised", "patterns", "bias", None, "plain"]:
        llama.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])])


def test_slots_that_a_gpus_writer_fills_are_the_same(llama):
    engine = llama.engine(bias_enabled=True, max_loras=1)
    manager = engine.adapters.manager
    manager.slot_writer = SlotWriter(manager.wrapped, "cpu")

    for name in [*llama.names, *reversed(llama.names)]:
        llama.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])], max_tokens=3)


def test_the_biases_alone_move_the_logits(llama):
    """Agreement proves nothing of biases that are too small to count."""
    prompt = [5, 9, 60, 3]
    for name in ("bias", "rank-stabilised", "patterns"):
        oracle = llama.make_oracle(name)
        with_bias = oracle.logits(name, [prompt])

        for parameter, tensor in oracle.peft.named_parameters():
            if parameter.endswith(f"lora_B.{name}.bias"):
                torch.nn.init.zeros_(tensor)
        moved = (oracle.logits(name, [prompt]) - with_bias).abs().max()

        assert moved > 0.1 * with_bias.abs().max(), name


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_peft_biases_that_change_the_base_model_stay_refused(llama, folder, bias):
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias": "none"', f'"bias": "{bias}"'))
    engine = llama.engine(bias_enabled=True)

    with pytest.raises(ValueError, match=f"bias '{bias}'.*changes the base model"):
        engine.add_request("a", [3], greedy(2), lora_request=llama.request("bias", lora_path=str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.lora_B.bias": torch.zeros(47)}, r"q_proj has lora_B.bias \(47,\), expected \(48,\)"),
        ({f"{Q}.lora_B.bias": torch.zeros(48, 1)}, r"lora_B.bias must be one vector.*\(48, 1\)"),
        ({f"{Q}.lora_B.bias": torch.zeros(48).int()}, "lora_B.bias must be one vector of floats.*int32"),
        (
            {"model.layers.0.mlp.up_proj.lora_B.bias": torch.zeros(80)},
            "up_proj has lora_B.bias but not lora_A",
        ),
        ({f"{Q[17:]}.lora_B.bias": torch.zeros(48)}, "is there twice"),
    ],
    ids=["another width", "a matrix", "integers", "alone", "twice"],
)
def test_a_bias_that_does_not_fit_is_refused_by_name(llama, folder, changes, message):
    edit(folder, **changes)
    engine = llama.engine(bias_enabled=True)
    before = snapshot(engine)

    with pytest.raises(ValueError, match=message):
        engine.add_request("a", [3], greedy(2), lora_request=llama.request("bias", lora_path=str(folder)))

    assert snapshot(engine) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.7e308])
def test_a_bias_that_is_no_number_once_scaled_fails_the_request_that_needs_it(llama, folder, value):
    """Only the numbers tell, and they are read when the adapter is needed."""
    edit(folder, **{f"{Q}.lora_B.bias": torch.full((48,), value, dtype=torch.float64)})
    engine = llama.engine(bias_enabled=True)

    with pytest.raises(ValueError, match=r"q_proj\.lora_B\.bias holds NaN or Inf"):
        engine.add_lora(llama.request("bias", lora_path=str(folder)))

    llama.assert_serves(engine, [("plain", [3, 4])])


def test_a_bias_on_the_output_embedding_is_refused(llama, tmp_path):
    from tests.worlds.adapters import save_adapter

    config = {"r": 4, "target_modules": ["q_proj", "lm_head"], "lora_bias": True}
    folder = save_adapter(tmp_path / "head", llama.base, 0, **config)
    engine = llama.engine(bias_enabled=True)

    with pytest.raises(ValueError, match=r"lm_head has a bias on B.*embeddings and experts"):
        engine.add_request("a", [3], greedy(2), lora_request=llama.request("bias", lora_path=str(folder)))


def test_a_bias_on_an_expert_is_refused(tmp_path):
    """It would have to be added once for each expert that a token runs, as weighted as its output."""
    world = TinyWorld(tmp_path, "mixtral", {"attention": {"target_modules": ["q_proj"], "lora_bias": True}})
    expert = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w1"
    edit(
        world.path("attention"),
        **{
            f"{expert}.lora_A.weight": torch.ones(8, 48, dtype=torch.float64),
            f"{expert}.lora_B.weight": torch.ones(80, 8, dtype=torch.float64),
            f"{expert}.lora_B.bias": torch.ones(80, dtype=torch.float64),
        },
    )
    engine = world.engine(bias_enabled=True)

    with pytest.raises(ValueError, match=r"experts\.2\.w1 has a bias on B.*embeddings and experts"):
        engine.add_request("a", [3], greedy(2), lora_request=world.request("attention"))
