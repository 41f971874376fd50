"""Adapters on experts of which processes share out both A and B.

Stands for `fully_sharded` in vllm/lora/layers/fused_moe.py (v0.22.1). As for linears: w13 is column-parallel, w2 is
row-parallel, and the rows are pairs of a token and an expert.
"""

from dataclasses import replace
from typing import Any

import torch

from minivllm.config import LoRAConfig
from minivllm.layers.fused_moe import FusedMoE
from minivllm.lora.backend import Backend
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.slots import Slots
from minivllm.options.experts import W13, FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.options.halved_slots import halve


class FusedMoEWithShardedLoRA(FusedMoEWithLoRA):
    """Processes have some ranks each of w13's A, and some rows each of w2's B; alone, one has all."""

    def __init__(self, base_layer: FusedMoE) -> None:
        super().__init__(base_layer)
        self.tp = base_layer.tp
        if self.tp.size > 1:
            own = self.tp.part_of(base_layer.hidden_size, "the experts' hidden size")
            of_w1, _, *of_w3 = self.share.rows
            self.share = replace(self.share, rows=[of_w1, [own], *of_w3])

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)
        if self.tp.size > 1:
            a, own = list(self.slots.a), -(-self.max_rank // self.tp.size)
            a[W13] = [whole[:, :, :own].clone() for whole in a[W13]]
            self.slots = Slots(a, self.slots.b)

    def set_mapping(self, punica_wrapper: Backend) -> None:
        if self.tp.size == 1:
            super().set_mapping(punica_wrapper)
            return
        self.backend = punica_wrapper
        self.slots = halve(self.slots, punica_wrapper, self.tp, W13)

    def pack(self, parts: list[LoRALayerWeights | None]) -> PackedLoRALayerWeights:
        """Ranks are cut last: only packed experts have as many each."""
        packed = super().pack(parts)
        if self.tp.size > 1:
            for part in filter(None, packed.parts[W13]):
                part.lora_a = part.lora_a[:, self.slots.deal.of(part.lora_a.shape[1])]
        return packed

    def _is_reached(self) -> bool:
        """Whether the step has adapters at all: all processes must say the same, and one may have no rank of any."""
        if self.tp.size == 1:
            return super()._is_reached()
        return not self.backend.no_lora

    def _add(self, y: torch.Tensor, x: torch.Tensor, rows: Any, slices: slice) -> None:
        """All ranks of w13's h are gathered, terms of w2's are summed; both are expanded as far as B is here."""
        if self.tp.size == 1:
            super()._add(y, x, rows, slices)
            return
        h = self.slots.shrink(x, self.backend, rows, slices)  # (P, n, own ranks)
        if slices == W13:
            h = self.tp.all_gather(h)[..., : self.max_rank]  # (P, n, R)
        else:
            h = self.tp.all_reduce(h)  # (P, 1, R)
            (own,) = self.share.rows[1]
            y = y[:, own]
        self.slots.expand(y, h, self.backend, rows, slices)


class FusedMoE3DWithShardedLoRA(FusedMoEWithShardedLoRA, FusedMoE3DWithLoRA):
    """The same with gate and up in one."""


SHARDED = {FusedMoEWithLoRA: FusedMoEWithShardedLoRA, FusedMoE3DWithLoRA: FusedMoE3DWithShardedLoRA}
