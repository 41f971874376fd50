"""Adapters as PEFT saves them, against the weights that PEFT itself merges, in float64.

No exercise's: PEFT takes seconds to import. `test_merged_weights.py` asks the same of what PEFT has answered before.
"""

import itertools
import json

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import PackedLoRALayerWeights
from minivllm.lora.peft_helper import PEFTHelper
from tests.oracles.merged import CONFIGS, PeftAdapters
from tests.worlds.adapter_folders import MODEL_MODULES

pytestmark = [pytest.mark.filterwarnings(f"ignore:::{module}") for module in ("peft", "transformers")]

# In the file the keys are sorted, and of keys that overlap the first one counts.
OVERLAPPING_ALPHAS = {
    "r": 4,
    "lora_alpha": 2,
    "target_modules": ["q_proj", "v_proj"],
    "alpha_pattern": {"q_proj": 3, "layers.1.self_attn.q_proj": 17, r"self_attn\..*": 29},
}
OVERLAPPING_RANKS = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {"v_proj": 5, "layers.0.self_attn.v_proj": 3},
}


@pytest.fixture(scope="module")
def peft_adapters(tmp_path_factory):
    return PeftAdapters(tmp_path_factory.mktemp)


def read(folder, expected=MODEL_MODULES, dtype=torch.float64, **options):
    helper = PEFTHelper.from_local_dir(str(folder), extensions=LORA_EXTENSIONS)
    helper.validate_legal(LoRAConfig(max_lora_rank=16))
    return LoRAModel.from_local_checkpoint(
        str(folder), expected, helper, lora_model_id=1, dtype=dtype, **options
    )


def product(lora):
    """scaling * B @ A in float64; an embedding's weight is the transpose of its B @ A."""
    return lora.scaling * (lora.lora_b.double() @ lora.lora_a.double())


def assert_close(ours, merged, tolerance=1e-12):
    torch.testing.assert_close(ours, merged, rtol=0, atol=tolerance * merged.abs().max().item())


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), OVERLAPPING_ALPHAS], ids=[*CONFIGS, "overlapping alphas"]
)
def test_every_module_adds_what_peft_merges_from_the_same_folder(config, peft_adapters):
    """What PEFT makes of the file, where keys are sorted; above, what it made of its own config."""
    folder, deltas = peft_adapters.make(config, reload=True)

    lora = read(folder)

    assert lora.loras.keys() == deltas.keys()
    for name, delta in deltas.items():
        assert_close(product(lora.loras[name]), delta)


def test_alphas_whose_keys_overlap_are_those_of_the_file(peft_adapters):
    """The case above is one: what sorting changed, changed the scaling."""
    folder, _ = peft_adapters.make(OVERLAPPING_ALPHAS)
    in_file = json.loads((folder / "adapter_config.json").read_text())["alpha_pattern"]

    lora = read(folder)

    assert list(in_file) != list(OVERLAPPING_ALPHAS["alpha_pattern"])
    scalings = {name: weights.scaling for name, weights in lora.loras.items()}
    assert scalings["model.layers.1.self_attn.q_proj"] == 17 / 4
    assert scalings["model.layers.0.self_attn.q_proj"] == 3 / 4
    assert scalings["model.layers.0.self_attn.v_proj"] == 29 / 4


def test_ranks_whose_keys_overlap_are_those_of_the_tensors(peft_adapters):
    """Sorted, the keys say rank 3 where training had 5: PEFT cannot read such a folder back, and the file is right."""
    folder, deltas = peft_adapters.make(OVERLAPPING_RANKS)
    in_file = json.loads((folder / "adapter_config.json").read_text())["rank_pattern"]

    lora = read(folder)

    assert list(in_file) != list(OVERLAPPING_RANKS["rank_pattern"])
    assert lora.loras["model.layers.0.self_attn.v_proj"].rank == 5
    for name, delta in deltas.items():
        assert_close(product(lora.loras[name]), delta)


FUSED = {"self_attn": ["q_proj", "k_proj", "v_proj"], "mlp": ["gate_proj", "up_proj"]}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_parts_add_what_peft_merges_into_each_of_them(config, peft_adapters):
    """q, k, v and gate, up, with parts missing, of different ranks and scalings."""
    folder, deltas = peft_adapters.make(config)
    lora = read(folder)

    packed_parts = 0
    for layer, (block, parts) in itertools.product((0, 1), FUSED.items()):
        names = [f"model.layers.{layer}.{block}.{part}" for part in parts]
        if not any(name in deltas for name in names):
            continue
        packed = PackedLoRALayerWeights.pack([lora.get_lora(name) for name in names])
        for i, name in enumerate(names):
            if name in deltas:
                assert_close(packed.lora_b[i] @ packed.lora_a[i], deltas[name])
                packed_parts += 1
            else:
                assert packed.lora_a[i] is packed.lora_b[i] is None

    fused = [name for name in deltas if not name.endswith(("o_proj", "down_proj"))]
    assert packed_parts == len(fused)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checkpoint_of_less_precision_is_read_without_losing_any(saved, peft_adapters):
    folder, deltas = peft_adapters.make(CONFIGS["patterns"], save_dtype=saved)

    as_saved, in_float64 = read(folder, dtype=None), read(folder)

    for name, delta in deltas.items():
        assert as_saved.loras[name].lora_a.dtype == as_saved.loras[name].lora_b.dtype == saved
        assert_close(product(as_saved.loras[name]), delta)
        assert_close(product(in_float64.loras[name]), delta)


def test_embeddings_add_what_peft_merges_and_the_base_tables_beside_them_are_left_out(peft_adapters):
    targets = ["embed_tokens", "lm_head", "q_proj"]
    folder, deltas = peft_adapters.make({"r": 4, "lora_alpha": 6, "target_modules": targets})

    lora = read(folder, expected=targets, model_vocab_size=97)

    assert lora.loras.keys() == deltas.keys()
    assert_close(product(lora.loras["model.embed_tokens"]).T, deltas["model.embed_tokens"])
    assert_close(product(lora.loras["lm_head"]), deltas["lm_head"])


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_peft_converted_to_plain_lora_adds_what_training_added(init, peft_adapters):
    """The way out that the refusal of these initialisations names."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=init)
    folder = peft_adapters.new_folder("converted")
    torch.manual_seed(3)
    adapted = peft.get_peft_model(peft_adapters.base.float(), config)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(folder / "initial")
    adapted.peft_config["default"].init_lora_weights = init
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data += 0.1 * torch.randn(weight.shape)
    adapted.save_pretrained(folder, path_initial_model_for_weight_conversion=folder / "initial")
    merged = {name: p.double() for name, p in adapted.merge_and_unload().named_parameters()}
    peft_adapters.base.double()
    peft_adapters._restore()

    lora = read(folder)

    assert len(lora.loras) == 2
    for name, weights in lora.loras.items():
        weight = f"{name}.weight"
        assert_close(product(weights), merged[weight] - peft_adapters.weights[weight], tolerance=1e-5)
