"""What slots take, three times: as predicted from two configs, as `get_memory_stats` tells, and by the allocator."""

import dataclasses

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.economics import adapted_layers, slot_memory
from minivllm.gpu.slot_writer import SlotWriter
from tests.tools.limits import allocated_by, live_bytes
from tests.worlds.slot_models import base_model, large, manage, tiny

BACKENDS = ["loops", "grouped", "triton"]
OPTIONS = {
    "defaults": {},
    "no-embeddings": {"target_modules": ["q_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "two-modules": {"target_modules": ["model.layers.1.self_attn.v_proj", "embed_tokens"]},
    "biases": {"bias_enabled": True},
    "scales of DoRA": {"enable_dora": True},
    "added-tokens": {"lora_extra_vocab_size": 5},
    "longer-contexts": {"long_lora_scaling_factors": (2.3, 4)},
    "all-at-once": {
        "bias_enabled": True,
        "lora_extra_vocab_size": 3,
        "long_lora_scaling_factors": (1.7,),
        "target_modules": ["k_proj", "up_proj", "lm_head"],
    },
}


def assert_within(percent, found, expected):
    assert abs(found - expected) <= expected * percent / 100, f"{found:,} bytes instead of {expected:,}"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("backend", [*BACKENDS, "paged"])
def test_what_is_told_is_what_the_allocator_gave_out_and_what_was_predicted(backend, options):
    architecture = tiny("llama-linear-rope-biases-tied")
    config = LoRAConfig(6, 3, punica_backend=backend, **options)
    _, base = allocated_by(lambda: base_model(architecture, torch.float32))

    manager, everything = allocated_by(lambda: manage(base_model(architecture, torch.float32), config))

    told, predicted = manager.get_memory_stats(), slot_memory(architecture, config)
    assert told["device_total"] == everything - base
    assert told["slot_buffers"] == predicted.slots
    of_backend = sum(table.nbytes for table in manager.punica_wrapper.tables)
    of_slots = manager.punica_wrapper.live_ranks.ranks.nbytes if backend in ("triton", "paged") else 0
    of_slots += manager.punica_wrapper.pool.table.nbytes if backend == "paged" else 0
    assert told["tables"] == predicted.tables + of_backend - of_slots


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(
    "architecture", [large("llama-8b", vocab_size=128256), large("qwen-0.6b")], ids=["llama-8b", "qwen-0.6b"]
)
def test_large_models_too(architecture, rank, backend):
    config = LoRAConfig(rank, 8, punica_backend=backend, lora_extra_vocab_size=64, bias_enabled=True)
    model = base_model(architecture, torch.bfloat16, "meta")
    before = live_bytes("meta")

    manager = manage(model, config, "meta")

    told = manager.get_memory_stats()
    assert told["device_total"] == live_bytes("meta") - before
    predicted = slot_memory(architecture, config, dtype=torch.bfloat16)
    assert told["slot_buffers"] == predicted.slots
    assert_within(1, predicted.total, told["device_total"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("variant", ["qwen2-tied", "qwen3-moe-a-dense-layer"])
def test_what_an_adapter_arrives_in_is_predicted(variant, options):
    architecture = tiny(variant)
    config = LoRAConfig(6, 3, punica_backend="triton", **options)
    manager = manage(base_model(architecture, torch.float32), config)

    manager.slot_writer, allocated = allocated_by(lambda: SlotWriter(manager.wrapped, "cpu"))

    on_gpu = slot_memory(architecture, config, "cuda", torch.float32)
    told = manager.get_memory_stats()
    assert told["staging"] == on_gpu.staging
    assert allocated == on_gpu.staging + manager.slot_writer.places.nbytes
    here = slot_memory(architecture, config, "cpu", torch.float32)
    assert on_gpu.tables == here.tables + manager.slot_writer.places.nbytes
    assert told["device_total"] == told["slot_buffers"] + told["staging"] + told["tables"]


def test_the_figures_can_be_checked_by_hand():
    """Two layers, H = 48, V = 97, I = 80, four heads and two of them for keys and values, of 12 each."""
    architecture = tiny("qwen2-tied")
    config = LoRAConfig(max_lora_rank=4, max_loras=5, lora_extra_vocab_size=3, bias_enabled=True)

    on_cpu = slot_memory(architecture, config)
    on_gpu = slot_memory(architecture, config, "cuda", torch.float16)

    qkv, o = (48 + 48) + (48 + 24) + (48 + 24), 48 + 48
    gate_up, down = (48 + 80) + (48 + 80), 80 + 48
    vocabulary = (97 + 3) + 48
    assert on_cpu.a_and_b == 5 * 4 * (2 * (qkv + o + gate_up + down) + 2 * vocabulary) * 4
    biases = (48 + 24 + 24) + 48 + (80 + 80) + 48
    assert on_cpu.beside == 5 * (2 * biases + 2 * 3 * 48 + 3) * 4  # of the head also which tokens there are
    assert on_cpu.layout == 0
    assert (on_cpu.staging, on_cpu.tables) == (0, 0)
    assert on_cpu.slots == on_cpu.a_and_b + on_cpu.beside + on_cpu.layout
    # Linears lie in pages, and a page has eight ranks.
    assert on_gpu.a_and_b == 5 * 4 * 2 * vocabulary * 2
    assert on_gpu.pages == 5 * 8 * 2 * (qkv + o + gate_up + down) * 2
    assert (on_gpu.layout, on_cpu.pages) == (0, 0)
    pieces = 2 * 2 * (3 + 1 + 2 + 1) + 2 * 2 + 2 * 7 + 3
    ranks = 2 * 7 + 2
    assert on_gpu.tables == pieces * 6 * 8 + ranks * 5 * 4 + 5 * 4  # and which page each slot has


def test_dtypes_are_those_of_the_device():
    architecture = large("qwen-0.6b")  # bfloat16
    config = LoRAConfig(8, 2, punica_backend="triton")

    assert (
        slot_memory(architecture, config, "cpu").a_and_b
        == 2 * slot_memory(architecture, config, "cuda").a_and_b
    )
    half = dataclasses.replace(config, lora_dtype="float16")
    assert slot_memory(architecture, half, "cpu").a_and_b == slot_memory(architecture, config, "cuda").a_and_b


def test_every_layer_that_can_be_wrapped_is_known_by_its_name_and_sizes():
    """H = 48, V = 97, I = 80, four heads and two of them for keys and values, of 12 each."""
    in_block = {
        "self_attn.qkv_proj": [(48, 48), (48, 24), (48, 24)],
        "self_attn.o_proj": [(48, 48)],
        "mlp.gate_up_proj": [(48, 80), (48, 80)],
        "mlp.down_proj": [(80, 48)],
    }
    blocks = {f"model.layers.{i}.{name}": pairs for i in range(2) for name, pairs in in_block.items()}
    ends = {"model.embed_tokens": [(97, 48)], "lm_head": [(48, 97)]}

    assert adapted_layers(tiny("qwen2-tied")) == ends | blocks


def test_each_expert_has_pairs_of_its_own():
    layers = adapted_layers(tiny("mixtral"))

    assert layers["model.layers.1.mlp.gate"] == [(48, 4)]
    assert sorted(layers["model.layers.1.mlp.experts"]) == sorted([(48, 80), (80, 48), (48, 80)] * 4)


def test_layers_that_are_not_wrapped_are_left_out():
    config = LoRAConfig(target_modules=["v_proj", "lm_head"])

    names = list(adapted_layers(tiny("phi3-fused"), config))

    assert names == ["model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj", "lm_head"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("variant", "targets", "wrapped"),
    [
        ("mixtral", None, ["embed_tokens", "experts", "gate", "lm_head", "o_proj", "qkv_proj"]),
        ("mixtral", ["gate"], ["gate"]),
        ("mixtral", ["experts.2.w1", "model.layers.1.self_attn.q_proj"], ["experts", "qkv_proj"]),
        ("mixtral", ["up_proj", "o_proj"], ["experts", "o_proj"]),
        ("qwen3-moe-a-dense-layer", ["gate_proj"], ["experts", "gate_up_proj"]),
        ("qwen3-moe-a-dense-layer", ["model.layers.2.mlp.experts", "lm_head"], ["experts", "lm_head"]),
    ],
)
def test_experts_count_once_for_each_of_them(backend, variant, targets, wrapped):
    architecture = tiny(variant)
    config = LoRAConfig(5, 2, punica_backend=backend, target_modules=targets)
    model = base_model(architecture, torch.float32, "meta")
    before = live_bytes("meta")

    manager = manage(model, config, "meta")

    told = manager.get_memory_stats()
    assert told["device_total"] == live_bytes("meta") - before
    assert told["slot_buffers"] == slot_memory(architecture, config).slots
    assert sorted({name.rpartition(".")[2] for name in manager.modules}) == wrapped
