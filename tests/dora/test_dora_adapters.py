"""DoRA adapters on every backend and base: logits by PEFT's, slots that change hands, and what is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from minivllm.cli import app
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.lora.peft_helper import PEFTHelper
from tests.oracles.peft import dequantized_oracle
from tests.tools.device import interpreted
from tests.worlds.adapters import ADAPTERS, change_json, save_adapter
from tests.worlds.engines import TinyWorld, greedy, run, snapshot

SET = {
    "plain": ADAPTERS["all"],
    **{f"dora {name}": {**config, "use_dora": True} for name, config in ADAPTERS.items()},
}
FUSED = {
    "dora fused": {"r": 4, "lora_alpha": 7, "target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    "plain": {"r": 3, "lora_alpha": 9, "target_modules": ["qkv_proj", "down_proj"]},
}
VARIANTS = {"llama-llama3-rope": SET, "llama-linear-rope-biases-tied": SET, "phi3-fused": FUSED}
# Backend -> how far off logits may be, as a share of the largest: kernels compute in float32 whatever the dtype.
BACKENDS = {"loops": 1e-10, "grouped": 1e-10, "triton": 1e-5, "paged": 1e-5}
MAGNITUDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"

_sets = {}


def made(variant, tmp_path_factory):
    if variant not in _sets:
        _sets[variant] = TinyWorld(tmp_path_factory.mktemp("dora"), variant, VARIANTS[variant])
    return _sets[variant]


@pytest.fixture
def llama(tmp_path_factory):
    return made("llama-llama3-rope", tmp_path_factory)


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of an adapter to spoil."""
    return shutil.copytree(llama.path("dora qv"), tmp_path / "spoilt")


def edit(folder, **changes):
    path = folder / "adapter_model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    "backend",
    [
        *("loops", "grouped", pytest.param("paged", marks=interpreted)),
        pytest.param("triton", marks=[pytest.mark.nightly, interpreted]),
    ],
)
@pytest.mark.parametrize(
    "variant",
    ["llama-linear-rope-biases-tied", *(pytest.param(v, marks=pytest.mark.nightly) for v in ("phi3-fused",))],
)
def test_every_backend_gives_the_logits_of_peft(variant, backend, tmp_path_factory):
    world = made(variant, tmp_path_factory)
    engine = world.engine(enable_dora=True, max_loras=4, punica_backend=backend)

    world.assert_serves(engine, world.workload(1, rows=2), max_tokens=4, tolerance=BACKENDS[backend])


def test_a_slot_that_had_scales_serves_an_adapter_without(llama):
    engine = llama.engine(enable_dora=True, max_loras=1)

    for name in ["dora all", "plain", "dora qv", "dora mlp", "plain", None, "dora patterns"]:
        llama.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])])


def test_so_it_does_while_another_slot_has_scales(llama):
    """On a CPU nobody looks at scales, and so at those that were left, unless an adapter in a slot has any."""
    engine = llama.engine(enable_dora=True, max_loras=2)

    for name in ["dora all", "dora qv", "plain"]:  # the plain one takes the first one's slot
        llama.assert_serves(engine, [(name, [5, 9, 5, 3])])
    assert engine.debug_info()["slots"][0] == llama.request("plain").lora_int_id


@interpreted
def test_slots_that_a_gpus_writer_fills_are_the_same(llama):
    engine = llama.engine(enable_dora=True, max_loras=1)
    manager = engine.adapters.manager
    manager.slot_writer = SlotWriter(manager.wrapped, "cpu")

    for name in ["dora all", "plain", "dora patterns", "dora qv"]:
        llama.assert_serves(engine, [(name, [5, 9, 5, 3]), (None, [5, 9, 5, 3])], max_tokens=3)


@pytest.mark.parametrize("variant", ["llama-llama3-rope", "llama-linear-rope-biases-tied"])
def test_weights_that_a_cpu_has_reordered_have_the_same_norms(variant, tmp_path_factory):
    """In float32, where no plain weight is left: its rows are what the layer makes of unit vectors."""
    world = made(variant, tmp_path_factory)
    engine = world.engine(enable_dora=True, max_loras=4, dtype="float32")

    world.assert_serves(engine, world.workload(1, rows=2), max_tokens=3, tolerance=1e-4)


def test_over_an_int8_base_the_norms_are_those_of_what_it_computes_with(llama):
    engine = llama.engine(enable_dora=True, max_loras=4, dtype="float32", quantization="torchao")
    name, prompt = "dora all", [5, 9, 60, 3, 7]
    oracle = dequantized_oracle(engine.runner.model, llama.base, {"dora_all": llama.path(name)})
    engine.add_request("r", prompt, greedy(1, prompt_logprobs=0), lora_request=llama.request(name))

    output = run(engine)["r"]

    logits = oracle.logits("dora_all", [prompt])[0].log_softmax(-1)
    expected = torch.stack([logits[i, token] for i, token in enumerate(prompt[1:])])
    found = torch.tensor(
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])]
    )
    assert torch.allclose(found.double(), expected, atol=1e-4)


# ---- refused by name ------------------------------------------------------------------------------------------


def refused(llama, folder, message, **options):
    engine = llama.engine(**{"enable_dora": True, **options})
    before = snapshot(engine)

    with pytest.raises(ValueError, match=message):
        request = llama.request("dora qv", lora_path=str(folder))
        engine.add_request("a", [3], greedy(2), lora_request=request)

    assert snapshot(engine) == before


def test_an_engine_that_is_not_told_refuses_them_and_names_the_option(llama, folder):
    refused(llama, folder, "adapter 'dora qv'.*DoRA .*pass --enable-dora", enable_dora=False)


def test_the_core_by_itself_refuses_them_whatever_the_option(llama, folder):
    engine = llama.engine(enable_dora=True)

    with pytest.raises(ValueError, match="does not yet support DoRA"):
        PEFTHelper.from_local_dir(str(folder)).validate_legal(engine.config.lora_config)


CONFIGS = [
    *(({"use_dora": value}, "use_dora must be true or false") for value in ("true", 1, [True])),
    ({"lora_bias": True}, "DoRA .* is not supported with lora_bias"),  # what PEFT does not combine it with
    ({"target_parameters": ["experts"]}, "DoRA .* is not supported with target_parameters"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=str)
def test_a_config_that_makes_no_sense_is_refused_by_name(llama, folder, changes, message):
    change_json(folder / "adapter_config.json", **changes)

    refused(llama, folder, message, bias_enabled=True)


MAGNITUDES = {
    "another width": (torch.ones(47), r"q_proj has lora_magnitude_vector \(47,\), expected \(48,\)"),
    "a matrix": (torch.ones(48, 1), r"lora_magnitude_vector must be one vector.*\(48, 1\)"),
    "integers": (torch.ones(48).int(), "lora_magnitude_vector must be one vector of floats.*int32"),
    "none": (None, "q_proj has no lora_magnitude_vector, though adapter_config.json says use_dora"),
}


@pytest.mark.parametrize(("magnitude", "message"), MAGNITUDES.values(), ids=MAGNITUDES)
def test_a_magnitude_that_does_not_fit_is_refused_by_name(llama, folder, magnitude, message):
    edit(folder, **{MAGNITUDE: magnitude})

    refused(llama, folder, message)


def test_a_magnitude_without_a_and_b_is_refused_by_name(llama, folder):
    edit(folder, **{MAGNITUDE.replace("q_proj", "k_proj"): torch.ones(24)})

    refused(llama, folder, "k_proj has .* but not lora_A")


def test_a_magnitude_of_no_number_ends_the_request_that_asked_for_it(llama, folder):
    edit(folder, **{MAGNITUDE: torch.full((48,), float("nan"))})
    engine = llama.engine(enable_dora=True)

    with pytest.raises(ValueError, match="q_proj has lora_magnitude_vector with numbers that are NaN or inf"):
        engine.add_lora(llama.request("dora qv", lora_path=str(folder)))

    assert engine.list_loras() == set()
    llama.assert_serves(engine, [("plain", [3, 4])])


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_embeddings_and_the_head_are_refused_by_name(llama, tmp_path, module):
    config = {"r": 2, "target_modules": ["q_proj", module], "use_dora": True}
    folder = save_adapter(tmp_path / "ends", llama.base, 0, **config)

    refused(llama, folder, f"{module} is no linear inside the model")


def test_ranks_that_share_a_model_are_refused_by_name(llama):
    from minivllm.dora.magnitudes import DoRA

    engine = llama.engine(enable_dora=True)
    wrapped = engine.adapters.manager.wrapped
    wrapped.modules["model.layers.0.mlp.down_proj"].base_layer.tp = type(
        "TwoRanks", (), {"size": 2, "rank": 0}
    )()

    with pytest.raises(ValueError, match="one process, but tensor_parallel_size is 2"):
        DoRA().wrap_model(engine.runner.model, wrapped, engine.config.lora_config)


def test_inspect_knows_it(llama):
    arguments = ["inspect", str(llama.path("dora qv")), "--model", str(llama.base), "--json"]

    fits = CliRunner().invoke(app, [*arguments, "--enable-dora"])
    does_not = CliRunner().invoke(app, arguments)

    assert fits.exit_code == 0 and json.loads(fits.stdout)["beside"] == {"use_dora": True}
    (reason,) = json.loads(does_not.stdout)["reasons"]
    assert does_not.exit_code == 1 and "--enable-dora" in reason
