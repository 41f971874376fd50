"""The calculator against what the engine allocates and what PyTorch says tensors take."""

import pytest
import torch
from tiny_adapters import save_adapter, save_base
from tiny_models import VARIANTS

from minivllm import EngineArgs, LLMEngine, LoRARequest
from minivllm.economics import GIB, adapter_bytes, cost_per_tenant, kv_bytes_per_token, plan, weight_bytes
from minivllm.layers.attention import Attention
from minivllm.models.config import ModelArchitecture

RANK, SLOTS, BLOCK = 6, 3, 4
# Experts and fused checkpoints are not predicted.
PREDICTED = sorted(set(VARIANTS) - {"phi3-fused", "mixtral", "qwen3-moe-a-dense-layer"})


@pytest.fixture(scope="module", params=PREDICTED)
def folder(request, tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "model", request.param, torch.float32)


@pytest.fixture(scope="module")
def engine(folder):
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=RANK,
        punica_backend="loops",
        block_size=BLOCK,
        num_kv_blocks=9,
        warm_up=False,
    )
    return LLMEngine(args.create_engine_config(), None, warm_up=False)


@pytest.fixture(scope="module")
def model(folder):
    return ModelArchitecture.from_folder(folder)


def test_weights_are_what_transformers_loads(folder, model):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    assert weight_bytes(model, 4) == sum(parameter.nbytes for parameter in loaded.parameters())


def test_slots_are_what_the_engine_allocates(engine, model):
    buffers = [
        buffer
        for layer in engine.adapters.manager.modules.values()
        for buffer in (*layer.lora_a_stacked, *layer.lora_b_stacked)
    ]

    assert SLOTS * adapter_bytes(model, RANK, 4) == sum(buffer.nbytes for buffer in buffers)
    assert engine.adapters.manager.get_memory_stats()["slot_buffers"] == SLOTS * adapter_bytes(model, RANK, 4)


def test_a_token_of_the_cache_is_what_the_engine_allocates(engine, model):
    caches = [module.kv_cache for module in engine.runner.model.modules() if isinstance(module, Attention)]

    assert 9 * BLOCK * kv_bytes_per_token(model, 4) == sum(cache.nbytes for cache in caches)


def test_an_adapter_is_what_its_file_holds(engine, folder, model, tmp_path):
    path = save_adapter(tmp_path / "adapter", folder, 0, r=RANK, lora_alpha=4, target_modules="all-linear")

    engine.add_lora(LoRARequest("a", 1, str(path)))

    assert adapter_bytes(model, RANK, 4) == engine.adapters.manager.get_memory_stats()["cpu_total"]


def test_more_slots_leave_less_for_keys_and_values_byte_for_byte(model):
    few, many = (plan(model, GIB, slots, RANK, 10, activations=0, itemsize=4) for slots in (1, 5))

    assert few.weights == many.weights
    assert few.kv_cache - many.kv_cache == 4 * adapter_bytes(model, RANK, 4)
    assert few.requests == few.kv_tokens // 10


def test_a_plan_without_room_says_what_takes_it(model):
    with pytest.raises(ValueError, match=r"100 slots .* leave 0\.0 GiB"):
        plan(model, 2**20, 100, RANK, 10)


def test_tenants_share_as_few_devices_as_carry_them():
    # 1,000 tokens a second is 3.6 million an hour: 36 tenants of 100,000 each.
    assert cost_per_tenant(2.0, 36, 1000, 100_000) == pytest.approx(2.0 / 36)
    assert cost_per_tenant(2.0, 37, 1000, 100_000) == pytest.approx(4.0 / 37)
    assert cost_per_tenant(2.0, 1, 1000, 1) == 2.0
