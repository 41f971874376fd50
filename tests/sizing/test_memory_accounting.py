"""Slots come before the KV cache: refused if they can never fit, and off the memory that it is given."""

import os
from functools import partial

import pytest
import torch

from minivllm import EngineArgs, LLMEngine
from minivllm.assembly import LORA_EXTENSIONS
from minivllm.economics import slot_memory
from minivllm.gpu.measured_memory import MeasuredMemory
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.sizing.slot_memory import room_for_slots
from minivllm.worker.model_runner import ModelRunner
from tests.tools.limits import live_bytes
from tests.worlds.engines import tiny_world

OPTIONS = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 16, "block_size": 4, "warm_up": False}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def config(world, **options):
    return EngineArgs(model=str(world.base), **{**OPTIONS, **options}).create_engine_config()


class StandInGPU:
    """Looks like a GPU of so many bytes, of which every tensor made from now on takes its part."""

    def __init__(self, monkeypatch, total):
        self.total, self.before = total, live_bytes()
        self.at_profile_run = None
        doubles = {
            "set_device": lambda device: None,
            "empty_cache": lambda: None,
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": self.note,
            "max_memory_allocated": self.taken,
            "memory_allocated": self.taken,
            "memory_reserved": self.taken,
            "mem_get_info": lambda device: (self.total - self.taken(device), self.total),
        }
        for name, double in doubles.items():
            monkeypatch.setattr(torch.cuda, name, double)

    def taken(self, device=None):
        return live_bytes() - self.before

    def note(self, device):
        self.at_profile_run = self.taken()


class RunnerOnStandIn(ModelRunner):
    on_gpu = property(lambda self: True, lambda self, value: None)

    def __init__(self, config, **options):
        make = partial(LRUCacheWorkerLoRAManager, extensions=LORA_EXTENSIONS)
        super().__init__(config, make_lora_manager=make, **options)


def test_the_kv_cache_gets_what_slots_leave_byte_for_byte(world, monkeypatch):
    few, many = (config(world, max_loras=n, max_num_seqs=500) for n in (1, 40))
    gpu = StandInGPU(monkeypatch, total=8 * 2**20)

    with_few = RunnerOnStandIn(few, memory=MeasuredMemory(captures=False))
    before, blocks_with_few = gpu.at_profile_run, with_few.num_blocks
    del with_few
    with_many = RunnerOnStandIn(many, memory=MeasuredMemory(captures=False))

    slots = [slot_memory(c.model_config.architecture, c.lora_config).slots for c in (few, many)]
    # They are there when the profile run starts.
    assert gpu.at_profile_run - before == slots[1] - slots[0]
    block = with_many.kv_block_bytes
    assert abs((blocks_with_few - with_many.num_blocks) * block - (slots[1] - slots[0])) < block
    assert (
        with_many.num_blocks * block
        < gpu.total - with_many.lora_manager.manager.get_memory_stats()["device_total"]
    )


def test_slots_that_leave_no_room_for_two_blocks_are_named(world, monkeypatch):
    StandInGPU(monkeypatch, total=2**20)

    with pytest.raises(
        ValueError, match=r"weights, LoRA slots .* or lower max_num_batched_tokens or max_loras"
    ):
        RunnerOnStandIn(config(world, max_loras=40), memory=MeasuredMemory(captures=False))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            {"lora_extra_vocab_size": 2**20, "max_lora_rank": 2**20},
            "max_lora_rank (1048576) or lora_extra_vocab_size (1048576), or",
        ),
        (
            {"long_lora_scaling_factors": [1e9]},
            "max_lora_rank (16) or long_lora_scaling_factors ((1000000000.0,)), or",
        ),
    ],
)
def test_what_makes_slots_too_large_is_named(world, option, said):
    with pytest.raises(ValueError) as refusal:
        LLMEngine(config(world, **option), None, warm_up=False)

    assert said in str(refusal.value)


def test_slots_that_can_never_fit_are_refused_before_they_are_allocated(world, monkeypatch):
    engine_config = config(world, max_loras=3, max_lora_rank=64)
    needed = slot_memory(engine_config.model_config.architecture, engine_config.lora_config).total
    page = os.sysconf("SC_PAGE_SIZE")
    pages = needed // page  # a page too few
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": page}[name])
    before = live_bytes()

    with pytest.raises(ValueError) as refusal:
        LLMEngine(engine_config, None, warm_up=False)

    assert str(refusal.value) == (
        f"LoRA slots need {needed:,} bytes, but cpu has {pages * page:,} for them: lower max_loras (3) or "
        "max_lora_rank (64), or name fewer target_modules than "
        "down_proj, embed_tokens, gate_up_proj, lm_head, o_proj, qkv_proj"
    )
    refusal.value.__traceback__ = None
    assert live_bytes() - before < needed


def test_slots_that_just_fit_are_allocated(world, monkeypatch):
    engine_config = config(world, max_loras=3, target_modules=["q_proj"])
    needed = slot_memory(engine_config.model_config.architecture, engine_config.lora_config).total
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": needed, "SC_PAGE_SIZE": 1}[name])

    engine = LLMEngine(engine_config, None, warm_up=False)

    assert engine.debug_info()["memory"]["device_total"] == needed


def test_what_a_gpu_has_room_for_counts_memory_that_pytorch_holds_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)

    assert room_for_slots("cuda:0") == 1200


def test_a_cpus_kv_cache_is_what_was_asked_for_whatever_slots_take(world):
    runners = [ModelRunner(config(world, max_loras=n, kv_cache_memory_bytes=2**20)) for n in (1, 30)]

    assert runners[0].num_blocks == runners[1].num_blocks == 2**20 // runners[0].kv_block_bytes
