"""Fully sharded adapters on experts: both A and B are cut among the processes.

Stands for `fully_sharded` in vllm/lora/layers/fused_moe.py (v0.22.1). As for linears: w13 is column-parallel, w2 is
row-parallel, and the rows are pairs of a token and an expert.
"""

from dataclasses import replace
from typing import Any

import torch

from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.ranks import Share
from minivllm.lora.backend import Backend
from minivllm.lora.lora_weights import PackedLoRALayerWeights
from minivllm.lora.slots import Slots
from minivllm.options.experts_arithmetic import W13, ExpertsArithmetic
from minivllm.options.two_step_slots import TwoStepSlots, two_step


class ShardedExperts(ExpertsArithmetic):
    """Of two processes or more, each of which has some ranks of w13's A, and some rows of w2's B."""

    def __init__(self, base_layer: FusedMoE, share: Share, max_rank: int) -> None:
        own = base_layer.tp.part_of(base_layer.hidden_size, "the experts' hidden size")
        of_w1, _, *of_w3 = share.rows
        super().__init__(base_layer, replace(share, rows=[of_w1, [own], *of_w3]), max_rank)

    def cut_slots(self, slots: Slots) -> Slots:
        a, own = list(slots.a), -(-self.max_rank // self.tp.size)
        a[W13] = [whole[:, :, :own].clone() for whole in a[W13]]
        return Slots(a, slots.b)

    def place(self, slots: Slots, backend: Backend) -> TwoStepSlots:
        self.backend = backend
        return two_step(slots, backend, self.tp, W13)

    def own(self, packed: PackedLoRALayerWeights, slots: TwoStepSlots) -> PackedLoRALayerWeights:
        """Ranks are cut last: only packed experts have as many each."""
        for part in filter(None, packed.parts[W13]):
            part.lora_a = part.lora_a[:, slots.sharding.of(part.lora_a.shape[1])]
        return packed

    def is_reached(self, slots: TwoStepSlots) -> bool:
        """Whether the step has adapters at all: all processes must say the same, and one may have no rank of any."""
        return not self.backend.no_lora

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: TwoStepSlots, rows: Any, slices: slice) -> None:
        """All ranks of w13's h are gathered, terms of w2's are summed; both are expanded as far as B is here."""
        h = slots.shrink(x, self.backend, rows, slices)  # (P, n, own ranks)
        if slices == W13:
            h = self.tp.all_gather(h)[..., : self.max_rank]  # (P, n, R)
        else:
            h = self.tp.all_reduce(h)  # (P, 1, R)
            (own,) = self.share.rows[1]
            y = y[:, own]
        slots.expand(y, h, self.backend, rows, slices)
