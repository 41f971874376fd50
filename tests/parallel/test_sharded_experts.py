"""Experts' adapters of which processes share out both A and B: tokens, meetings, memory."""

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.models import registry
from minivllm.models.config import ModelArchitecture
from minivllm.models.llama import MixtralForCausalLM, Qwen3MoeForCausalLM
from minivllm.options.experts import FusedMoEWithLoRA
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.worlds.experts import MIXTRAL, QWEN, sparse_world
from tests.worlds.models import token_ids
from tests.worlds.ranks import assert_shared_engines_answer, engines_in_lockstep, serve
from tests.worlds.slot_models import manage, tiny

FULLY = {"max_loras": 3, "max_cpu_loras": 20, "fully_sharded_loras": True}
# Of few ranks, of one part, of some experts: at four processes of two ranks each some have nothing.
NAMES = ["parameters/gate and up", "parameters/down", "old/plain", "old/one expert", "old/patterns"]


@pytest.fixture(params=[MIXTRAL, pytest.param(QWEN, marks=pytest.mark.nightly)])
def world(request, tmp_path_factory):
    return sparse_world(tmp_path_factory, request.param)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_tokens_are_those_of_peft(world, size, monkeypatch):
    assert_shared_engines_answer(monkeypatch, world, size, world.workload(rows=2, adapters=NAMES), 3, **FULLY)


@pytest.mark.parametrize(
    "backend", ["loops", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("triton", "paged"))]
)
def test_every_backend_gives_them(world, backend, monkeypatch):
    options = {**FULLY, "punica_backend": backend}

    assert_shared_engines_answer(
        monkeypatch, world, 2, world.workload(rows=2, adapters=NAMES)[:5], 2, **options
    )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_gate_and_up_may_be_in_one(world, size, monkeypatch):
    for kind in (MixtralForCausalLM, Qwen3MoeForCausalLM):
        in_one = type(f"{kind.__name__}3D", (kind,), {"is_3d_moe_weight": True})
        monkeypatch.setitem(registry.MODELS, kind.__name__, in_one)
    pairs = world.workload(rows=2, adapters=[name for name in world.names if name.startswith("parameters/")])

    assert_shared_engines_answer(monkeypatch, world, size, pairs, 3, **FULLY)


def test_processes_meet_twice_more_a_layer_over_rank_sized_rows(world, monkeypatch):
    tokens, rank = 5, 6

    def meetings(name):
        def work(tp):
            engine = world.engine(
                max_loras=1, max_lora_rank=rank, target_modules=["experts"], fully_sharded_loras=True
            )
            tp.calls.clear()
            serve(engine, world, [(name, token_ids(tokens, 0))], 1)
            return tp.calls

        return engines_in_lockstep(monkeypatch, 4, work)

    base, found = meetings(None), meetings("old/one expert")

    model = ModelArchitecture.from_folder(world.base)
    pairs = tokens * model.num_experts_per_tok
    more = [("all_gather", pairs * 2 * 2), ("all_reduce", pairs * rank)] * len(model.sparse_layers)
    for calls, without in zip(found, base, strict=True):
        assert sorted(calls) == sorted([*without, *more])


def test_a_process_has_its_share_of_every_a_and_b():
    model, slots, rank, size = tiny(MIXTRAL), 3, 8, 4
    config = LoRAConfig(rank, slots, target_modules=["experts"], fully_sharded_loras=True)

    for tp in [TensorParallel(i, size) for i in range(size)]:
        experts = manage(shared_model(model, tp), config).modules["model.layers.0.mlp.experts"]

        hidden, inner = model.hidden_size, model.moe_intermediate_size
        each = slots * model.num_experts * rank * torch.float32.itemsize // size
        of_a_and_b = sum(buffer.nbytes for buffer in (*experts.slots.a, *experts.slots.b))
        assert of_a_and_b == each * 3 * (hidden + inner)


@pytest.mark.parametrize("rank", [0, 1])
def test_slots_that_a_gpus_writer_fills_are_the_same(rank):
    model = tiny(MIXTRAL)
    config = LoRAConfig(6, 2, punica_backend="triton", target_modules=["experts"], fully_sharded_loras=True)

    def filled(with_writer):
        manager = manage(shared_model(model, TensorParallel(rank, 2)), config)
        if with_writer:
            manager.slot_writer = SlotWriter(manager.wrapped, "cpu")
        for adapter_id, ranks in ((1, 6), (2, 5), (3, 2)):  # the third takes the first one's slot
            manager.add_adapter(random_adapter(model, adapter_id, ranks))
            manager.activate_adapter(adapter_id)
        return [layer.slots for layer in manager.modules.values()]

    for slots, expected in zip(filled(True), filled(False), strict=True):
        assert slots.live_ranks == expected.live_ranks
        for matrix, other in zip((*slots.a, *slots.b), (*expected.a, *expected.b), strict=True):
            assert torch.equal(matrix, other)


def test_a_hidden_size_that_cannot_be_divided_is_refused_by_name():
    model = tiny(MIXTRAL)
    experts = shared_model(model, TensorParallel(0, 2)).model.layers[0].mlp.experts
    experts.hidden_size = 47

    with pytest.raises(
        ValueError, match="the experts' hidden size 47 cannot be divided by tensor_parallel_size 2"
    ):
        FusedMoEWithLoRA(experts).create_lora_weights(2, LoRAConfig(6, 2, fully_sharded_loras=True))


def shared_model(model, tp):
    return registry.MODELS[model.architecture](model, torch.float32, "cpu", tp)


def random_adapter(model, adapter_id, rank):
    """On w1 and w2 of the first expert, of the second all of another rank, of the third nothing."""
    generator = torch.Generator().manual_seed(adapter_id)
    hidden, inner = model.hidden_size, model.moe_intermediate_size
    loras = {}
    for expert, part, r in ((0, 1, rank), (0, 2, rank), (1, 1, 1), (1, 2, 2), (1, 3, rank)):
        height, width = (hidden, inner) if part == 2 else (inner, hidden)
        a, b = (torch.randn(shape, generator=generator) for shape in ((r, width), (height, r)))
        name = f"model.layers.1.mlp.experts.{expert}.w{part}"
        loras[name] = LoRALayerWeights(name, r, 2 * r, a, b)
    return LoRAModel(adapter_id, rank, loras)
