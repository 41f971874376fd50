"""What slots take of each process that shares a model: as counted by hand, as predicted, and as told."""

import pytest
import torch

from minivllm import EngineArgs
from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig, ParallelConfig
from minivllm.economics import GIB, plan, slot_memory
from minivllm.gpu.pages.manager import ElasticModelManager
from minivllm.gpu.pages.slots import ALIGNMENT
from minivllm.gpu.pages.writer import PagedSlotWriter
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.worlds.slot_models import large, manage, tiny

LINEARS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize("fully", [False, True], ids=["cut", "fully sharded"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", ["grouped", "triton"])
def test_it_is_as_predicted(backend, size, fully):
    architecture = tiny("llama-linear-rope-biases-tied")
    options = {"bias_enabled": True, "lora_extra_vocab_size": 3, "fully_sharded_loras": fully}
    config = LoRAConfig(6, 3, punica_backend=backend, **options)

    for rank in range(size):
        tp = TensorParallel(rank, size)
        model = MODELS[architecture.architecture](architecture, torch.float32, "cpu", tp)

        told = manage(model, config).get_memory_stats()["slot_buffers"]

        predicted = slot_memory(architecture, config, tp=tp).slots
        assert abs(told - predicted) <= predicted / 100


@pytest.mark.parametrize(("size", "rank"), [(2, 16), (8, 64)])
def test_an_8b_models_a_and_b_can_be_counted_by_hand(size, rank):
    model, slots, two_bytes = large("llama-8b"), 8, 2
    hidden, q, kv, inner = 4096, 4096, 1024, 14336

    def bytes_of(fully):
        config = LoRAConfig(rank, slots, target_modules=LINEARS, fully_sharded_loras=fully)
        taken = slot_memory(model, config, "cuda", torch.bfloat16, TensorParallel(size - 1, size))
        assert taken.a_and_b == 0  # all lies in pages
        return taken.pages

    outputs = q + 2 * kv + 2 * inner
    columns = 5 * hidden + outputs // size, 5 * hidden // size + outputs // size
    rows = (q + inner) // size + 2 * hidden, (q + inner) // size + 2 * hidden // size
    of_a_layer = [column + row for column, row in zip(columns, rows)]
    assert [bytes_of(False), bytes_of(True)] == [32 * slots * rank * two_bytes * n for n in of_a_layer]


def test_two_devices_hold_what_one_cannot():
    model, config = large("llama-8b"), LoRAConfig(64, 8, target_modules=LINEARS, fully_sharded_loras=True)
    memory, context = 16 * GIB, 8192

    with pytest.raises(ValueError, match="too little for the keys and values of 8192 tokens"):
        plan(model, memory, config, context)

    shared = plan(model, memory, config, context, tp=TensorParallel(1, 2))
    alone = plan(model, 4 * memory, config, context)
    per_token = 32 * 2 * 8 * 128 * 2
    assert shared.weights == pytest.approx(alone.weights / 2, rel=1e-3)  # norms are whole
    assert shared.kv_tokens == shared.kv_cache // (per_token // 2)
    assert alone.kv_tokens == alone.kv_cache // per_token


def random_adapter(model, adapter_id, rank):
    """On one column-parallel and one row-parallel linear."""
    generator = torch.Generator().manual_seed(adapter_id)
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {"self_attn.q_proj": (hidden, hidden), "mlp.down_proj": (hidden, inner)}
    loras = {}
    for name, (height, width) in shapes.items():
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, width), (height, rank)))
        full_name = f"model.layers.1.{name}"
        loras[full_name] = LoRALayerWeights(full_name, rank, rank, a, b)
    return LoRAModel(adapter_id, rank, loras)


@pytest.fixture
def folder(tmp_path):
    from tests.worlds.models import transformers_model

    transformers_model("llama-llama3-rope").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("size", [3, 8])  # 8: more than there are heads
def test_an_engine_of_uneven_shares_is_refused_before_anything_is_started(folder, size):
    args = EngineArgs(model=folder, device="cpu", tensor_parallel_size=size)

    with pytest.raises(
        ValueError, match=f"num_attention_heads 4 cannot be divided by tensor_parallel_size {size}"
    ):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("size", "rank"),
    [(3, 16), (2, 12)],
    ids=["3 does not divide a page's 8 ranks", "a page's 8 ranks do not divide rank 12"],
)
def test_pages_are_refused_whose_ranks_cannot_be_shared_out(folder, monkeypatch, size, rank):
    # Else 3 processes are refused for the model's heads.
    monkeypatch.setattr(ModelArchitecture, "refuse_uneven_shares", lambda model, size: None)
    args = {"model": folder, "device": "cpu", "enable_lora": True, "fully_sharded_loras": True}
    paged = {**args, "punica_backend": "paged", "max_lora_rank": rank}

    EngineArgs(**paged).create_engine_config()  # a process alone has all ranks

    with pytest.raises(
        ValueError, match=rf"size {size} must divide them, and they max_lora_rank {rank}; use auto"
    ):
        EngineArgs(**paged, tensor_parallel_size=size).create_engine_config()


@pytest.mark.parametrize("rank", [0, 1])
def test_pages_that_a_gpus_writer_fills_are_the_same(rank):
    model = tiny("llama-llama3-rope")
    config = LoRAConfig(16, 2, punica_backend="paged", fully_sharded_loras=True)

    def filled(with_writer):
        base = MODELS[model.architecture](model, torch.float32, "cpu", TensorParallel(rank, 2))
        manager = ElasticModelManager(
            base, 8, 64, model.vocab_size, config, "cpu", extensions=LORA_EXTENSIONS
        )
        manager.pool.bind_own(6)
        manager.pool.regions[0].zero_()
        if with_writer:
            manager.slot_writer = PagedSlotWriter(manager.wrapped, "cpu", manager.pool)
        for adapter_id, ranks in ((1, 13), (2, 6), (3, 10)):  # the third takes the first one's slot
            manager.add_adapter(random_adapter(model, adapter_id, ranks))
            manager.activate_adapter(adapter_id)
        assert [len(pages) for pages in manager.pool.ledger.held.values()] == [1, 2]
        live = [part.live_ranks for m in manager.modules.values() for part in getattr(m.slots, "parts", [])]
        return manager.pool.regions[0], live

    (pages, live), (expected, others) = filled(True), filled(False)

    assert torch.equal(pages, expected) and pages.any()
    assert live == others


def test_a_page_of_fully_sharded_adapters_has_a_share_of_every_a_and_b():
    model, slots = tiny("llama-llama3-rope"), 3
    modules = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    config = LoRAConfig(16, slots, punica_backend="paged", fully_sharded_loras=True, target_modules=modules)

    def page_elements(tp):
        base = MODELS[model.architecture](model, torch.float32, "cpu", tp)
        manager = ElasticModelManager(
            base, 8, 64, model.vocab_size, config, "cpu", extensions=LORA_EXTENSIONS
        )
        return manager.pool.page_elements(1)

    alone, pieces = page_elements(TensorParallel(0, 1)), 2 * 14  # in each layer 7 A's and 7 B's
    for rank in range(4):
        own = page_elements(TensorParallel(rank, 4))
        assert alone <= 4 * own < alone + 4 * pieces * ALIGNMENT


def test_on_a_gpu_fully_sharded_adapters_get_a_backend_that_uses_a_and_b_apart(folder, monkeypatch):
    monkeypatch.setattr("minivllm.config.parse_device", lambda device: device)
    config = EngineConfig(
        ModelConfig(folder),
        lora_config=LoRAConfig(fully_sharded_loras=True, max_loras=None),
        parallel_config=ParallelConfig(2),
        device="cuda",
    )

    assert config.lora_config.punica_backend == "triton"
