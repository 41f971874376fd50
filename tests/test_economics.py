"""The calculator against what the engine allocates and what PyTorch says tensors take."""

import pytest
import torch

from minivllm import EngineArgs, LLMEngine, LoRARequest
from minivllm.config import LoRAConfig
from minivllm.economics import (
    GIB,
    adapter_bytes,
    cost_per_tenant,
    kv_bytes_per_token,
    plan,
    slot_memory,
    weight_bytes,
)
from minivllm.layers.attention import Attention
from minivllm.models.config import ModelArchitecture
from tests.worlds.adapters import save_adapter
from tests.worlds.models import VARIANTS, save_base

RANK, SLOTS, BLOCK = 6, 3, 4


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def folder(request, tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "model", request.param, torch.float32)


@pytest.fixture(scope="module")
def model(folder):
    return ModelArchitecture.from_folder(folder)


@pytest.fixture(scope="module")
def engine(folder):
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=RANK,
        block_size=BLOCK,
        num_kv_blocks=9,
        warm_up=False,
    )
    return LLMEngine(args.create_engine_config(), None, warm_up=False)


def test_weights_are_what_transformers_loads(folder, model):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    assert weight_bytes(model, 4) == sum(parameter.nbytes for parameter in loaded.parameters())


def test_slots_are_what_the_engine_allocates(engine, model):
    predicted = slot_memory(model, engine.config.lora_config)

    memory = engine.debug_info()["memory"]
    assert memory["slot_buffers"] == predicted.slots
    assert memory["device_total"] == predicted.total


def test_a_token_of_the_cache_is_what_the_engine_allocates(engine, model):
    caches = [module.kv_cache for module in engine.runner.model.modules() if isinstance(module, Attention)]

    assert 9 * BLOCK * kv_bytes_per_token(model, 4) == sum(cache.nbytes for cache in caches)


def test_an_adapter_is_what_its_file_holds(engine, folder, model, tmp_path):
    if model.num_experts:
        pytest.skip("PEFT's all-linear leaves experts and routers out")
    path = save_adapter(tmp_path / "adapter", folder, 0, r=RANK, lora_alpha=4, target_modules="all-linear")

    engine.add_lora(LoRARequest("a", 1, str(path)))

    shared = engine.adapters.manager.get_memory_stats()["cpu_total"]
    if model.model_type == "phi3":  # one A for q, k and v, one for gate and up
        assert shared == adapter_bytes(model, RANK, 4) - model.num_hidden_layers * 3 * RANK * 48 * 4
    else:
        assert shared == adapter_bytes(model, RANK, 4)


def test_an_adapter_of_a_sparse_model_has_a_pair_for_each_linear_of_each_expert():
    config = {
        "model_type": "mixtral",
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }

    model = ModelArchitecture.from_dict(config)

    attention = (8 + 8) + 2 * (8 + 4) + (8 + 8)  # q, k and v, o
    assert adapter_bytes(model, 3, 2) == 2 * 3 * (attention + (8 + 5) + 5 * 3 * (8 + 10))


def test_more_slots_leave_less_for_keys_and_values_byte_for_byte(model):
    few, many = (
        plan(model, GIB, LoRAConfig(RANK, slots), 10, activations=0, device="cpu") for slots in (1, 5)
    )

    assert few.weights == many.weights == weight_bytes(model, 4)
    assert few.kv_cache - many.kv_cache == many.slots - few.slots
    assert many.slots - few.slots == 4 * slot_memory(model, LoRAConfig(RANK, 1)).slots
    assert few.requests == few.kv_tokens // 10


def test_a_plan_without_slots_is_the_base_models(model):
    alone = plan(model, GIB, None, 10, activations=0, device="cpu")

    assert alone.slots == 0
    assert alone.kv_cache == int(0.9 * GIB) - weight_bytes(model, 4)


def test_a_plan_without_room_says_what_takes_it(model):
    with pytest.raises(ValueError, match=r"LoRA slots \(0\.\d GiB\) .* leave 0\.0 GiB"):
        plan(model, 2**20, LoRAConfig(RANK, 100), 10)


def test_tenants_share_as_few_devices_as_carry_them():
    # 1,000 tokens a second is 3.6 million an hour: 36 tenants of 100,000 each.
    assert cost_per_tenant(2.0, 36, 1000, 100_000) == pytest.approx(2.0 / 36)
    assert cost_per_tenant(2.0, 37, 1000, 100_000) == pytest.approx(4.0 / 37)
    assert cost_per_tenant(2.0, 1, 1000, 1) == 2.0
