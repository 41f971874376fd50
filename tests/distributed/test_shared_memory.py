"""What slots take of each process that shares a model: as counted by hand, as predicted, and as told."""

import pytest
import torch
from test_slot_memory import large, manage, tiny

from minivllm import EngineArgs
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig, ParallelConfig
from minivllm.distributed.tensor_parallel import TensorParallel
from minivllm.economics import slot_memory
from minivllm.models.registry import MODELS

LINEARS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize("fully", [False, True], ids=["cut", "fully sharded"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", ["grouped", "folded"])
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
        return slot_memory(model, config, "cuda", torch.bfloat16, TensorParallel(size - 1, size)).a_and_b

    outputs = q + 2 * kv + 2 * inner
    columns = 5 * hidden + outputs // size, 5 * hidden // size + outputs // size
    rows = (q + inner) // size + 2 * hidden, (q + inner) // size + 2 * hidden // size
    of_a_layer = [column + row for column, row in zip(columns, rows)]
    expected = [32 * slots * rank * two_bytes * n for n in of_a_layer]
    assert [bytes_of(False), bytes_of(True)] == expected
    alone = 32 * slots * rank * two_bytes * (5 * hidden + outputs + q + inner + 2 * hidden)
    assert expected[1] * size == alone


@pytest.fixture
def folder(tmp_path):
    from tiny_models import transformers_model

    transformers_model("llama-llama3-rope").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("size", "what"), [(3, "num_attention_heads 4"), (8, "num_attention_heads 4")])
def test_an_engine_of_uneven_shares_is_refused_before_anything_is_started(folder, size, what):
    args = EngineArgs(model=folder, device="cpu", tensor_parallel_size=size)

    with pytest.raises(ValueError, match=f"{what} cannot be divided by tensor_parallel_size {size}"):
        args.create_engine_config()


def test_pages_are_refused_where_a_and_b_are_used_apart(folder):
    args = {"model": folder, "device": "cpu", "enable_lora": True, "fully_sharded_loras": True}
    paged = {**args, "punica_backend": "paged"}

    EngineArgs(**paged).create_engine_config()  # a process alone has both

    with pytest.raises(ValueError, match=r"'paged' has A and B in one page, .* use auto or triton"):
        EngineArgs(**paged, tensor_parallel_size=2).create_engine_config()


def test_on_a_gpu_fully_sharded_adapters_get_a_backend_that_uses_a_and_b_apart(folder, monkeypatch):
    monkeypatch.setattr("minivllm.config.parse_device", lambda device: device)
    config = EngineConfig(
        ModelConfig(folder),
        lora_config=LoRAConfig(fully_sharded_loras=True, max_loras=None),
        parallel_config=ParallelConfig(2),
        device="cuda",
    )

    assert config.lora_config.punica_backend == "triton"
