"""Adapters on experts and routers, in every format: the engine says what transformers says with each alone."""

import json
import random
import shutil
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LoRARequest
from minivllm.models import registry
from minivllm.models.llama import MixtralForCausalLM, Qwen3MoeForCausalLM
from minivllm.vllm.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from tests.oracles.peft import Oracle
from tests.tools.device import DEVICE
from tests.tools.watching import Products
from tests.worlds.adapters import save_adapter
from tests.worlds.engines import crossed, greedy, run, snapshot, tokens_of
from tests.worlds.experts import DOWN, GATE_UP, MIXTRAL, QWEN, OldAdapter, old_adapter, sparse_world
from tests.worlds.models import token_ids, transformers_model

# PEFT says it of patterns for parameters, which it honours all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")

NUM_TOKENS = 8
# What may not change a single token.
SETTINGS = {
    "plenty of everything": {"max_loras": 5, "max_cpu_loras": 20},
    "one slot, loops": {"max_loras": 1, "max_cpu_loras": 1, "punica_backend": "loops"},
    "chunks of 5 tokens": {"max_num_batched_tokens": 5, "max_num_seqs": 4, "max_cpu_loras": 20},
    "few blocks, loops": {"num_kv_blocks": 20, "max_loras": 3, "max_cpu_loras": 3, "punica_backend": "loops"},
}


@pytest.fixture(params=[MIXTRAL, QWEN])
def world(request, tmp_path_factory):
    return sparse_world(tmp_path_factory, request.param)


each_with_a_backend = pytest.mark.parametrize(
    ("world", "backend"), [(MIXTRAL, "loops"), (QWEN, "grouped")], indirect=["world"]
)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return sparse_world(tmp_path_factory, MIXTRAL)


def workload(world, seed):
    """Two prompts for every adapter and for base, one of them the same for all."""
    rng = random.Random(seed)
    same_for_all = token_ids(13, seed)
    pairs = [(name, same_for_all) for name in (None, *world.names)]
    pairs += [(name, token_ids(rng.randint(1, 20), 100 + i)) for i, name in enumerate((None, *world.names))]
    rng.shuffle(pairs)
    return pairs


def serve(engine, pairs):
    """pairs: (request for an adapter or None, prompt); the tokens of each"""
    for number, (request, prompt) in enumerate(pairs):
        engine.add_request(str(number), prompt, greedy(NUM_TOKENS), lora_request=request)
    outputs = run(engine)
    return [tokens_of(outputs[str(number)]) for number in range(len(pairs))]


def assert_answers(world, pairs, engine):
    found = serve(engine, [(world.request(name), prompt) for name, prompt in pairs])
    for (name, prompt), tokens in zip(pairs, found, strict=True):
        assert tokens == world.answer(name, prompt, NUM_TOKENS), f"{name}, prompt of {len(prompt)}"


class TestTokens:
    @pytest.mark.parametrize(("variant", "setting"), crossed([MIXTRAL, QWEN], SETTINGS))
    def test_of_a_mixed_batch_are_those_of_each_request_alone(self, tmp_path_factory, variant, setting):
        world = sparse_world(tmp_path_factory, variant)
        assert_answers(world, workload(world, seed=0), world.engine(**SETTINGS[setting]))

    def test_differ_from_the_base_models_with_every_adapter(self, world):
        """Or the tests here would not notice when one is missing."""
        prompts = [token_ids(13, 0), token_ids(9, 1), token_ids(20, 2)]

        for name in world.names:
            answers = [
                [world.answer(adapter, prompt, NUM_TOKENS) for prompt in prompts] for adapter in (name, None)
            ]
            assert answers[0] != answers[1], name

    @pytest.mark.nightly_without_gpu
    def test_with_triton_are_the_same(self, mixtral):
        names = [None, "parameters/patterns", "old/some experts", "parameters/attention"]
        pairs = [(name, token_ids(3 + i, i)) for i, name in enumerate(names)]

        assert_answers(
            mixtral, pairs, mixtral.engine(punica_backend="triton", dtype="float32", device=DEVICE)
        )

    @each_with_a_backend
    def test_of_a_slots_next_adapter_hold_nothing_of_the_last_ones_experts(self, world, backend):
        engine = world.engine(max_loras=1, max_cpu_loras=1, punica_backend=backend)
        prompt = token_ids(11, 5)

        for name in ("parameters/both", "parameters/attention", "old/gate alone", "old/some experts", None):
            assert_answers(world, [(name, prompt)], engine)

    def test_of_an_old_adapter_do_not_depend_on_whose_names_it_uses(self, world, tmp_path):
        """w1, w2, w3 or gate_proj, down_proj, up_proj, in the block under either name."""
        trained = old_adapter(world.variant, "patterns", other_names=True)
        path = trained.save(tmp_path / "adapter", transformers_model(world.variant), seed=3)
        oracle = Oracle(world.base)
        trained.merge(oracle.base, path)
        prompt = token_ids(11, 5)

        found = serve(world.engine(), [(LoRARequest("a", 1, str(path)), prompt)])

        assert found == [oracle.greedy(None, prompt, NUM_TOKENS)]
        assert found != [world.answer(None, prompt, NUM_TOKENS)]

    def test_of_an_old_adapter_are_what_peft_makes_of_it(self, world):
        """Where PEFT converts rightly: without rsLoRA, and if all of an expert is adapted."""
        oracle = Oracle(world.base)
        oracle.load("plain", world.path("old/plain"))

        for prompt in (token_ids(13, 0), token_ids(9, 1)):
            assert oracle.greedy("plain", prompt, NUM_TOKENS) == world.answer("old/plain", prompt, NUM_TOKENS)

    def test_an_adapter_trained_by_its_old_names_is_served_as_peft_saves_it_now(self, world, tmp_path):
        """PEFT makes parameters of these targets, with gate and up in one at twice the rank."""
        names = ["w1", "w2", "w3"] if world.variant == MIXTRAL else ["gate_proj", "down_proj", "up_proj"]
        config = {"r": 4, "lora_alpha": 7, "use_rslora": True, "target_modules": [*names, "gate", "v_proj"]}
        path = save_adapter(tmp_path / "adapter", world.base, 3, **config)
        oracle = Oracle(world.base)
        oracle.load("old names", path)
        prompt = token_ids(11, 5)

        found = serve(world.engine(), [(LoRARequest("a", 1, str(path)), prompt)])

        assert found == [oracle.greedy("old names", prompt, NUM_TOKENS)]
        assert found != [world.answer(None, prompt, NUM_TOKENS)]


def test_incident_5_rslora_scales_experts_too(mixtral, tmp_path):
    """vLLM 0.22.1 scales packed experts by alpha / rank of the first: 2.0 for 8.0 with rank 16 and alpha 32."""
    trained = OldAdapter(r=16, lora_alpha=32.0, use_rslora=True, router=False)
    path = trained.save(tmp_path / "adapter", transformers_model(MIXTRAL), seed=1)
    engine = mixtral.engine(max_loras=1)

    engine.add_lora(LoRARequest("rslora", 1, str(path)))

    weights = load_file(path / "adapter_model.safetensors")
    layer = engine.runner.model.get_submodule("model.layers.1.mlp.experts")
    for i, part in enumerate(("w1", "w2", "w3")):
        name = f"base_model.model.model.layers.1.block_sparse_moe.experts.3.{part}"
        a, b = layer.slots.a[i][0, 3], layer.slots.b[i][0, 3]
        expected = 8 * weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
        torch.testing.assert_close(b @ a, expected)


class TestServersTargets:
    @pytest.mark.parametrize(
        "targets", [["experts"], ["w2"], ["up_proj"], ["gate_up_proj"], ["experts.1.w3"]]
    )
    def test_may_name_the_experts_or_a_part_of_them(self, mixtral, targets):
        engine = mixtral.engine(target_modules=targets)

        kinds = {type(module) for module in engine.runner.lora_manager.manager.modules.values()}

        assert kinds == {FusedMoEWithLoRA}
        assert_answers(mixtral, [("old/gate alone", token_ids(9, 0)), (None, token_ids(9, 0))], engine)

    @pytest.mark.parametrize("name", ["parameters/both", "old/some experts"])
    def test_that_leave_the_experts_out_refuse_adapters_for_them(self, world, name):
        engine = world.engine(target_modules=["qkv_proj", "gate"])
        before = snapshot(engine)

        with pytest.raises(ValueError, match=r"experts.*the engine wraps only target_modules"):
            engine.add_lora(world.request(name))

        assert snapshot(engine) == before


def changed(folder, tmp_path, tensors=None, **config):
    """A copy of an adapter; `tensors` makes new ones of those of its file, `...` takes a field of the config out."""
    copy = shutil.copytree(folder, tmp_path / "changed")
    if tensors is not None:
        save_file(tensors(load_file(copy / "adapter_model.safetensors")), copy / "adapter_model.safetensors")
    path = copy / "adapter_config.json"
    values = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    return copy


def renamed(old, new):
    """Tensors with one piece of their names for another."""
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def besides(old, new):
    """Tensors, and copies of some under such names."""
    return lambda tensors: {
        **tensors,
        **{name.replace(old, new): tensor.clone() for name, tensor in tensors.items() if old in name},
    }


FIRST_A = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
FIRST_B = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
# The adapter, what is changed in it, and what has to be said. Of Mixtral with 4 experts, "both" of rank 3.
REFUSED = {
    "an expert that is not there": (
        "old/some experts",
        {"tensors": besides("experts.2.", "experts.4.")},
        r"does not offer: 'model\.layers\.0\.mlp\.experts\.4\.w1'",
    ),
    "one part under both names": (
        "old/plain",
        {"tensors": besides(".w3.", ".up_proj.")},
        r"experts\.0\.w3 has two adapters: this one and what .*experts\.0\.up_proj",
    ),
    "one part in the block under both names": (
        "old/plain",
        {"tensors": besides("block_sparse_moe.experts.1.w2.", "mlp.experts.1.w2.")},
        r"mlp\.experts\.1\.w2 is there twice",
    ),
    "one part in both formats": (
        "parameters/both",
        {
            "tensors": lambda t: {
                **t,
                **{
                    f"base_model.model.model.layers.0.mlp.experts.0.w2.lora_{side}.weight": w
                    for side, w in (("A", torch.ones(3, 80)), ("B", torch.ones(48, 3)))
                },
            }
        },
        r"experts\.0\.w2 has two adapters: this one and what .*experts\.down_proj",
    ),
    "experts of which the config says nothing": (
        "parameters/both",
        {"target_parameters": None},
        r"experts\.base_layer\.lora_A\.weight adapts a parameter of all experts, but .* has none",
    ),
    "two parameters of which the config names one": (
        "parameters/both",
        {"target_parameters": [DOWN]},
        r"experts\.base_layer\.lora_A\.weight adapts a parameter of all experts, but .* has only down_proj",
    ),
    "a parameter for the other": (
        "parameters/gate and up",
        {"target_parameters": [DOWN]},
        r"mlp\.experts\.down_proj has lora_A \(4, 5, 48\) and lora_B \(4, 160, 5\), expected \(4, 5, 80\)",
    ),
    "experts of another rank than the config's": (
        "parameters/both",
        {"r": 6},
        r"gate_up_proj has lora_A \(2, 6, 48\) and lora_B \(2, 160, 6\), expected \(4, 6, 48\)",
    ),
    "a rank that does not divide": (
        "parameters/both",
        {"r": 5},
        r"experts\.base_layer\.lora_A\.weight has shape \(12, 48\), expected rows for experts of rank 5",
    ),
    "fewer experts": (
        "parameters/both",
        {"tensors": lambda t: {**t, FIRST_A: t[FIRST_A][:9]}},
        r"down_proj: lora_A \(3, 3, 80\) and lora_B \(4, 48, 3\) differ in rank or in experts",
    ),
    "A without B": (
        "parameters/both",
        {"tensors": lambda t: {name: w for name, w in t.items() if name != FIRST_B}},
        r"experts\.gate_up_proj has lora_A but not lora_B",
    ),
    "NaN": (
        "parameters/both",
        {"tensors": lambda t: {**t, FIRST_B: t[FIRST_B] * float("nan")}},
        r"experts\.gate_up_proj\.lora_B holds NaN or Inf",
    ),
    "a parameter that is not served": (
        "parameters/both",
        {"target_parameters": [GATE_UP, DOWN, "experts.down_proj_bias"]},
        r"target_parameters \['experts\.down_proj_bias'\] are not supported",
    ),
    "parameters that are no list": (
        "parameters/both",
        {"target_parameters": "mlp.experts.down_proj"},
        r"target_parameters must be a list of names, got 'mlp\.experts\.down_proj'",
    ),
    "all experts under the parameter's own name": (
        "parameters/both",
        {"tensors": renamed("experts.base_layer.", "experts.gate_up_proj.")},
        r"experts\.gate_up_proj\.lora_A\.weight is unsupported LoRA weight",
    ),
    "an adapter for all of the experts": (
        "parameters/router",
        {"tensors": renamed("mlp.gate.", "mlp.experts.w1.")},
        r"does not offer: 'model\.layers\.0\.mlp\.experts\.w1'",
    ),
    "a rank beyond the slots'": (
        "parameters/patterns",
        {"rank_pattern": {"down_proj": 20}},
        r"rank 20 is greater than max_lora_rank 16; pass --max-lora-rank 20",
    ),
    "a bias on an expert": (
        "old/plain",
        {
            "tensors": lambda t: {
                **t,
                "base_model.model.model.layers.0.block_sparse_moe.experts.1.w2.lora_B.bias": torch.ones(48),
            },
            "lora_bias": True,
        },
        r"experts\.1\.w2 has a bias on B",
    ),
}


@pytest.fixture(scope="module")
def engine_with_plain(mixtral):
    """One place, which "old/plain" has and is still served from when all were refused."""
    engine = mixtral.engine(max_cpu_loras=1, max_loras=1, bias_enabled=True)
    engine.add_lora(mixtral.request("old/plain"))
    yield engine
    assert_answers(mixtral, [("old/plain", token_ids(9, 0))], engine)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_served_wrongly_is_refused_by_name(mixtral, engine_with_plain, tmp_path, case):
    name, changes, message = REFUSED[case]
    folder = changed(mixtral.path(name), tmp_path, **changes)
    before = snapshot(engine_with_plain)

    with pytest.raises(ValueError, match=message):
        engine_with_plain.add_lora(LoRARequest("bad", 99, str(folder)))

    assert snapshot(engine_with_plain) == before


def test_warming_up_runs_the_experts_adapters(world):
    engine = world.engine()
    manager = engine.adapters.manager
    dummy = manager.create_dummy_lora(7, 3)

    manager.add_adapter(dummy)
    manager.activate_adapter(7)

    experts = [layer for layer in manager.modules.values() if isinstance(layer, FusedMoEWithLoRA)]
    assert len(experts) == 2
    assert all(layer.slots.live_ranks == [[3, 0]] * 3 for layer in experts)
    manager.remove_adapter(7)
    engine.runner.warm_up()
    assert_answers(world, [("parameters/both", token_ids(9, 0)), (None, token_ids(9, 0))], engine)


class Mixtral3D(MixtralForCausalLM):
    is_3d_moe_weight: ClassVar = True


class Qwen3Moe3D(Qwen3MoeForCausalLM):
    is_3d_moe_weight: ClassVar = True


class TestGateAndUpInOne:
    """A model that says of its checkpoints, and so of adapters, that they have gate and up in one."""

    @pytest.fixture(autouse=True)
    def models(self, monkeypatch):
        monkeypatch.setitem(registry.MODELS, "MixtralForCausalLM", Mixtral3D)
        monkeypatch.setitem(registry.MODELS, "Qwen3MoeForCausalLM", Qwen3Moe3D)

    @each_with_a_backend
    def test_gets_the_same_tokens(self, world, backend):
        engine = world.engine(punica_backend=backend, max_loras=3)
        names = [None, *(name for name in world.names if name.startswith("parameters/"))]

        kinds = {type(module) for module in engine.runner.lora_manager.manager.modules.values()}

        assert FusedMoE3DWithLoRA in kinds and FusedMoEWithLoRA not in kinds
        assert_answers(world, [(name, token_ids(9 + i, i)) for i, name in enumerate(names)], engine)

    def test_has_no_room_for_gate_and_up_apart(self, world):
        with pytest.raises(ValueError, match=r"does not offer: 'model\.layers\.0\.mlp\.experts\.0\."):
            world.engine().add_lora(world.request("old/plain"))


def test_a_check_of_any_adapter_multiplies_nothing(world):
    """Experts' weights are scaled by layers of their own, and only where there are numbers."""
    worker = world.engine().adapters.worker

    with Products() as checking:
        for name in world.names:
            worker.source.check(world.request(name))
    with Products() as loading:
        worker.add_adapter(world.request("old/plain"))

    assert checking.found == []
    assert loading.found != []
