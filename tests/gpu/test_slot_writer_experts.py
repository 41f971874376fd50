"""What a GPU writes slots with, on experts: every expert's matrices are pieces of the same one transfer.

Without a GPU the kernel runs through Triton's interpreter.
"""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.linear import ReplicatedLinear
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.vllm.model_manager import LRUCacheLoRAModelManager
from tests.tools.device import DEVICE

HIDDEN, INNER, EXPERTS = 10, 14, 3
RANK, SLOTS = 5, 2
PARTS = {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER)}  # (K, N)


class SparseModel(nn.Module):
    supports_lora: ClassVar = True
    expert_params_mapping: ClassVar = tuple(PARTS)

    def __init__(self, is_3d=False):
        super().__init__()
        self.is_3d_moe_weight = is_3d
        self.mlp = nn.Module()
        self.mlp.gate = ReplicatedLinear(HIDDEN, EXPERTS, False, torch.float32)
        self.mlp.experts = FusedMoE(EXPERTS, 2, HIDDEN, INNER, params_dtype=torch.float32)
        for parameter in self.parameters():
            parameter.data.zero_()


def make_manager(is_3d=False):
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, max_cpu_loras=8, punica_backend="grouped")
    manager = LRUCacheLoRAModelManager(SparseModel(is_3d).to(DEVICE), 8, 64, 97, config, DEVICE)
    manager.slot_writer = SlotWriter(manager.wrapped, DEVICE)
    return manager


def adapter(adapter_id, ranks):
    """ranks: (expert, part) -> its rank; the adapter, and what B A of each part of each expert is, scaled"""
    generator = torch.Generator().manual_seed(adapter_id)
    loras, deltas = {}, {}
    for (expert, part), rank in ranks.items():
        name, (width, height) = f"mlp.experts.{expert}.{part}", PARTS[part]
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, width), (height, rank)))
        loras[name] = LoRALayerWeights(name, rank, 3.0, a, b)
        deltas[expert, part] = 3 / rank * b.double() @ a.double()
    return LoRAModel(adapter_id, RANK, loras), SimpleNamespace(deltas=deltas, ranks=ranks)


def assert_slot_holds(layer, slot, expected):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for i, (part, (width, height)) in enumerate(PARTS.items()):
        live = max((rank for (_, name), rank in expected.ranks.items() if name == part), default=0)
        assert layer.slots.live_ranks[i][slot] == live, part
        for expert in range(EXPERTS):
            a, b = layer.slots.a[i][slot, expert].cpu(), layer.slots.b[i][slot, expert].cpu()
            rank = expected.ranks.get((expert, part), 0)
            assert not a[rank:].any() and not b[:, rank:].any(), (
                f"{part} of expert {expert} beyond rank {rank}"
            )
            delta = expected.deltas.get((expert, part), torch.zeros(height, width, dtype=torch.float64))
            torch.testing.assert_close(b.double() @ a.double(), delta, atol=1e-6, rtol=1e-5)


EVERYTHING = {(expert, part): 5 - i for expert in range(EXPERTS) for i, part in enumerate(PARTS)}
ADAPTERS = {
    "every part": EVERYTHING,
    "ranks of its own for each": {key: 1 + (2 * key[0] + i) % 4 for i, key in enumerate(EVERYTHING)},
    "one part of one expert": {(1, "w2"): 4},
    "two experts, no down": {(0, "w1"): 2, (2, "w1"): 3, (2, "w3"): 1},
    "nothing of the experts": {},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_slot_holds_each_experts_matrices_and_nothing_of_the_last_adapter(name):
    manager = make_manager()
    layer = manager.modules["mlp.experts"]
    (first, of_first), (second, of_second) = adapter(1, EVERYTHING), adapter(2, ADAPTERS[name])
    gate = LoRALayerWeights("mlp.gate", 1, 1, torch.ones(1, HIDDEN), torch.ones(EXPERTS, 1))
    second.loras["mlp.gate"] = gate
    for lora in (first, second):
        manager.add_adapter(lora)
    manager.activate_adapter(1)
    manager.deactivate_adapter(1)
    manager.activate_adapter(2)
    manager.activate_adapter(1)

    assert manager.lora_index_to_id == [2, 1]
    assert_slot_holds(layer, 0, of_second)
    assert_slot_holds(layer, 1, of_first)


def test_gate_and_up_in_one_arrive_in_one():
    manager = make_manager(is_3d=True)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(EXPERTS, 2, HIDDEN, generator=generator)
    b = torch.randn(EXPERTS, 2 * INNER, 2, generator=generator)
    name = "mlp.experts.gate_up_proj"
    manager.add_adapter(LoRAModel(1, 2, {name: LoRALayerWeights(name, 2, 6.0, a, b)}))

    manager.activate_adapter(1)

    if DEVICE == "cuda":
        torch.cuda.synchronize()
    layer = manager.modules["mlp.experts"]
    found = layer.slots.b[0][0].cpu() @ layer.slots.a[0][0].cpu()
    torch.testing.assert_close(found, 3 * b @ a)
    assert layer.slots.live_ranks == [[2, 0], [0, 0]]
