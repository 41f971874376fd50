"""The manager that refuses where the other evicts, and what every manager needs."""

import random

import pytest
import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.model_manager import LoRAModelManager, create_lora_manager
from tests.oracles.tiers import TwoTiers
from tests.worlds.managers import SmallModel, make_adapter, make_plain_manager
from tests.worlds.tier_history import History, run


def test_it_refuses_when_no_slot_is_free_or_memory_is_full():
    manager = make_plain_manager(slots=1, memory=2)
    manager.add_adapter(make_adapter(1))
    manager.add_adapter(make_adapter(2))
    manager.activate_adapter(1)

    with pytest.raises(ValueError, match="No free lora slots"):
        manager.activate_adapter(2)
    with pytest.raises(RuntimeError, match="No free adapter slots"):
        manager.add_adapter(make_adapter(3))

    assert manager.lora_index_to_id == [1] and set(manager.list_adapters()) == {1, 2}


def test_it_knows_no_pins():
    manager = make_plain_manager(slots=1)
    manager.add_adapter(make_adapter(1))

    with pytest.raises(NotImplementedError, match="LRUCacheLoRAModelManager"):
        manager.pin_adapter(1)

    assert manager.pinned_adapters == set()


@pytest.mark.parametrize(("slots", "memory"), [(1, 2), (3, 4)])
def test_it_does_what_two_lists_do_that_refuse(slots, memory, monkeypatch):
    names = ["add"] * 3 + ["activate"] * 3 + ["deactivate", "remove", "touch"]
    for seed in range(8):
        manager, model = make_plain_manager(slots, memory), TwoTiers(slots, memory, evicts=False)

        run(History(manager, model, random.Random(seed), monkeypatch), names, steps=50)


def test_a_model_without_the_marker_is_refused():
    class Unmarked(nn.Sequential):
        pass

    with pytest.raises(ValueError, match="Model Unmarked is not supported for LoRA"):
        LoRAModelManager(Unmarked(), 1, 1, 1, LoRAConfig(), "cpu")


def test_create_lora_manager_wraps_the_model_in_place():
    model = SmallModel()

    manager = create_lora_manager(
        model,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        vocab_size=97,
        lora_config=LoRAConfig(max_loras=2, max_cpu_loras=3),
        vllm_config=None,
        device=torch.device("cpu"),
    )

    assert manager.model is model
    assert (manager.lora_slots, manager.capacity, len(manager)) == (2, 3, 0)
    assert manager.modules["attn.qkv_proj"] is model.attn.qkv_proj
    assert sorted(manager.supported_lora_modules) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
