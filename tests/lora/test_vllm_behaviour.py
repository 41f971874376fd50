"""Histories that vLLM's own unit tests (tests/lora/test_lora_manager.py, v0.22.1) go through, and their outcomes.

Facts of vLLM, retold as steps: (operation, adapter id, what comes back) and the slot table after each.
"""

import pytest
import torch

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
from minivllm.lora.worker_manager import WorkerLoRAManager
from minivllm.vllm.layers import LoRAMapping
from tests.worlds.managers import HIDDEN, Folders, make_adapter, make_manager, make_plain_manager, make_worker


def follow(manager, steps):
    """Each step: operation, adapter id or None, result or the type of the error, slot table afterwards."""
    adapters = {adapter_id: make_adapter(adapter_id) for adapter_id in (1, 2, 3, 4)}
    for number, (name, adapter_id, expected, slots) in enumerate(steps):
        call = getattr(manager, f"{name}_adapter")
        args = [] if adapter_id is None else [adapters[adapter_id] if name == "add" else adapter_id]
        if isinstance(expected, bool):
            assert call(*args) is expected, (number, name, adapter_id)
        else:
            with pytest.raises(expected):
                call(*args)
        assert manager.lora_index_to_id == slots, (number, name, adapter_id)


def test_the_plain_manager():
    manager = make_plain_manager(slots=2, memory=3)

    follow(
        manager,
        [
            ("add", 1, True, [None, None]),
            ("activate", 1, True, [1, None]),
            ("add", 1, False, [1, None]),
            ("activate", 1, False, [1, None]),
            ("add", 2, True, [1, None]),
            ("activate", 2, True, [1, 2]),
            ("add", 3, True, [1, 2]),
            ("activate", 3, ValueError, [1, 2]),
            ("remove", 2, True, [1, None]),
            ("remove", 2, False, [1, None]),
            ("remove", 1, True, [None, None]),
            ("remove", 1, False, [None, None]),
            ("add", 1, True, [None, None]),
            ("add", 2, True, [None, None]),
            ("activate", 3, True, [3, None]),
            ("activate", 2, True, [3, 2]),
        ],
    )

    assert manager.device == "cpu"
    assert manager.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY].device == "cpu"


def test_the_evicting_manager():
    manager = make_manager(slots=2, memory=3)

    follow(
        manager,
        [
            ("add", 1, True, [None, None]),
            ("activate", 1, True, [1, None]),
            ("add", 1, False, [1, None]),
            ("activate", 1, False, [1, None]),
            ("add", 2, True, [1, None]),
            ("activate", 2, True, [1, 2]),
            ("add", 3, True, [1, 2]),
            ("activate", 3, True, [3, 2]),
            ("remove", 2, True, [3, None]),
            ("remove", 2, False, [3, None]),
            ("remove", 1, True, [3, None]),
            ("add", 1, True, [3, None]),
            ("activate", 1, True, [3, 1]),
            ("add", 2, True, [3, 1]),
            ("deactivate", 3, True, [None, 1]),
            ("activate", 2, True, [2, 1]),
            ("activate", 3, True, [2, 3]),
            ("pin", 2, True, [2, 3]),
            ("activate", 1, True, [2, 1]),
            ("deactivate", 2, True, [None, 1]),
            ("activate", 3, True, [3, 1]),
            ("pin", 3, True, [3, 1]),
            ("pin", 1, True, [3, 1]),
            ("pin", 2, RuntimeError, [3, 1]),
            ("activate", 2, RuntimeError, [3, 1]),
            ("deactivate", 3, True, [None, 1]),
            ("pin", 2, True, [2, 1]),
            ("remove", 3, True, [2, 1]),
            ("pin", 3, ValueError, [2, 1]),
        ],
    )


def test_both_tiers_of_the_evicting_manager():
    manager = make_manager(slots=2, memory=2)

    follow(
        manager,
        [
            ("add", 1, True, [None, None]),
            ("add", 2, True, [None, None]),
            ("activate", 1, True, [1, None]),
            ("activate", 2, True, [1, 2]),
            ("add", 3, True, [None, 2]),
            ("add", 4, True, [None, None]),
            ("activate", 3, True, [3, None]),
            ("activate", 4, True, [3, 4]),
            ("add", 3, False, [3, 4]),
            ("activate", 3, False, [3, 4]),
            ("add", 2, True, [3, None]),
            ("activate", 2, True, [3, 2]),
            ("remove", 3, True, [None, 2]),
            ("remove", 3, False, [None, 2]),
            ("add", 3, True, [None, 2]),
            ("activate", 3, True, [3, 2]),
            ("add", 4, True, [3, None]),
            ("activate", 4, True, [3, 4]),
            ("remove_oldest", None, True, [None, 4]),
            ("remove_oldest", None, True, [None, None]),
            ("remove_oldest", None, False, [None, None]),
            ("add", 3, True, [None, None]),
            ("activate", 3, True, [3, None]),
            ("add", 4, True, [3, None]),
            ("activate", 4, True, [3, 4]),
            ("pin", 1, ValueError, [3, 4]),
            ("pin", 3, True, [3, 4]),
            ("remove", 3, True, [None, 4]),
            ("add", 1, True, [None, 4]),
            ("pin", 1, True, [1, 4]),
            ("add", 2, True, [1, None]),
            ("activate", 2, True, [1, 2]),
            ("remove_oldest", None, True, [1, None]),
            ("remove_oldest", None, RuntimeError, [1, None]),
        ],
    )

    assert set(manager.list_adapters()) == {1}


@pytest.mark.parametrize(
    ("cls_options", "steps"),
    [
        pytest.param(
            {},
            [
                ([1, 2], {1, 2}, [1, 2, None, None]),
                ([1, 3, 4], {1, 2, 3, 4}, [1, 2, 3, 4]),
                ([1, 2, 5], {1, 2, 4, 5}, [1, 2, 5, 4]),
                ([1, 1, 1], {1, 2, 4, 5}, [1, 2, 5, 4]),
                ([6, 7, 8], {1, 6, 7, 8}, [1, 7, 8, 6]),
            ],
            id="evicting",
        ),
        pytest.param(
            {"cls": WorkerLoRAManager},
            [
                ([1, 2], {1, 2}, [1, 2, None, None]),
                ([1, 3, 4], {1, 3, 4}, [1, 3, 4, None]),
                ([1, 2, 5], {1, 2, 5}, [1, 2, 5, None]),
                ([1, 1, 1], {1}, [1, None, None, None]),
                ([6, 7, 8], {6, 7, 8}, [8, 6, 7, None]),
            ],
            id="plain",
        ),
    ],
)
def test_the_worker_managers(tmp_path, cls_options, steps):
    folders = Folders(tmp_path)
    worker = make_worker(slots=4, **cls_options)

    for wanted, in_memory, slots in steps:
        worker.set_active_adapters(folders.requests(*wanted), LoRAMapping([], []))

        assert worker.list_adapters() == in_memory
        assert worker._adapter_manager.lora_index_to_id == slots
    with pytest.raises(RuntimeError):
        worker.set_active_adapters(folders.requests(10, 11, 12, 13, 14), LoRAMapping([], []))


def test_packed_adapters():
    def part(name):
        return LoRALayerWeights(name, 3, 12, torch.rand(3, HIDDEN), torch.rand(7, 3))

    gate, up = "mlp.gate_proj", "mlp.up_proj"
    both = LoRAModel(1, 3, {gate: part(gate), up: part(up)})
    up_only = LoRAModel(2, 3, {up: part(up)})
    gate_b, up_b = both.get_lora(gate).lora_b.clone(), both.get_lora(up).lora_b.clone()
    clone = up_only.clone(7)
    manager = make_plain_manager(slots=2)

    assert manager.add_adapter(both)
    assert manager.add_adapter(up_only)

    packed, half = both.get_lora("mlp.gate_up_proj"), up_only.get_lora("mlp.gate_up_proj")
    assert isinstance(packed, PackedLoRALayerWeights)
    assert both.get_lora(gate) is both.get_lora(up) is up_only.get_lora(up) is None
    assert torch.equal(packed.lora_b[0], gate_b * 4)
    assert torch.equal(packed.lora_b[1], up_b * 4)
    assert half.lora_a[0] is half.lora_b[0] is None
    assert torch.equal(half.lora_a[1], clone.get_lora(up).lora_a)
