"""Adapters on experts. Stands for vllm/lora/layers/fused_moe.py (v0.22.1)."""

from typing import ClassVar

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.fused_moe import ExpertPairs, FusedMoE
from minivllm.lora.layers.base import BaseLayerWithLoRA

# Which of the slices, w1, w2, w3 or w13, w2, are added to what w13 gives, and which to what w2 gives.
W13, W2 = slice(0, None, 2), slice(1, 2)


class FusedMoEWithLoRA(BaseLayerWithLoRA):
    """The experts of a layer with room for S adapters of each of them. vLLM: the same name.

    n_slices        3: w1 (gate), w2 (down) and w3 (up), of all E experts
    lora_a_stacked  3 buffers (S, E, R, K_i), K being H, I, H
    lora_b_stacked  3 buffers (S, E, N_i, R), N being I, H, I

    A pair of a token and an expert has the adapter in the token's slot s, and of that what it has for expert e. So it
    is a row with one of S * E adapters, number s * E + e, and backends add it up as they do for a linear.
    """

    in_cuda_graphs: ClassVar[bool] = False

    def __init__(self, base_layer: FusedMoE) -> None:
        shapes = self._shapes_of_parts(base_layer.hidden_size, base_layer.intermediate_size)
        super().__init__(base_layer, len(shapes))
        self.part_shapes = shapes
        self.num_experts = base_layer.num_experts
        self.tp_size, self.tp_rank = base_layer.tp_size, base_layer.tp_rank

    @staticmethod
    def _shapes_of_parts(hidden: int, inner: int) -> list[tuple[int, int]]:
        """K_i and N_i of every slice."""
        return [(hidden, inner), (inner, hidden), (hidden, inner)]

    def part_shape(self, part: int) -> tuple[int, int]:
        """As for a linear. Parts are counted by expert: slice i of expert e is part n_slices * e + i."""
        return self.part_shapes[part % self.n_slices]

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty."""
        weight, rank = self.base_layer.w13_weight, lora_config.max_lora_rank
        dtype = lora_config.slot_dtype(weight.dtype)
        slots, where = (max_loras, self.num_experts), {"dtype": dtype, "device": weight.device}
        self.lora_a_stacked = tuple(torch.zeros(*slots, rank, k, **where) for k, _ in self.part_shapes)
        self.lora_b_stacked = tuple(torch.zeros(*slots, n, rank, **where) for _, n in self.part_shapes)
        self.live_ranks = [[0] * max_loras for _ in self.part_shapes]

    @property
    def w13_lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.lora_a_stacked[W13]

    @property
    def w13_lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.lora_b_stacked[W13]

    @property
    def w2_lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.lora_a_stacked[W2]

    @property
    def w2_lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.lora_b_stacked[W2]

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """The base layer's stages, adapters added to what w13 and w2 give.   x: (T, H), router_logits: (T, E) -> (T, H)

        A batch none of whose adapters has experts is the base layer's alone.
        """
        base, punica = self.base_layer, self.punica_wrapper
        if punica.no_lora or not punica.reaches(self):
            return base(x, router_logits)
        pairs = base.route(router_logits)
        rows = punica.expert_rows(self, self._adapters_of(pairs, len(x)))
        x = x[pairs.rows]  # (P, H)
        gate_up = base.w13(x, pairs)  # (P, 2I)
        punica.add_lora_experts(self, W13, gate_up, x, rows)
        inner = base.act_fn(gate_up)  # (P, I)
        down = base.w2(inner, pairs)  # (P, H)
        punica.add_lora_experts(self, W2, down, inner, rows)
        return base.combine(down, pairs)

    def _adapters_of(self, pairs: ExpertPairs, tokens: int) -> torch.Tensor:
        """(P,) int64 s * E + e of each pair, -1 = base"""
        slots = self.punica_wrapper.slots_of_tokens(tokens)[pairs.rows]  # (P,)
        return (slots * self.num_experts + pairs.experts).masked_fill(slots < 0, -1)

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Experts, unless the checkpoint has w1 and w3 in one."""
        return type(source_layer) is FusedMoE and len(packed_modules_list) != 1


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """The same for models whose checkpoints, and so adapters, have gate and up in one. vLLM: the same name.

    n_slices        2: w13 (gate, then up) and w2 (down), of all E experts
    lora_a_stacked  2 buffers (S, E, R, K_i), K being H, I
    lora_b_stacked  2 buffers (S, E, N_i, R), N being 2I, H
    """

    @staticmethod
    def _shapes_of_parts(hidden: int, inner: int) -> list[tuple[int, int]]:
        return [(hidden, 2 * inner), (inner, hidden)]

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Experts whose checkpoint has w1 and w3 in one."""
        return type(source_layer) is FusedMoE and len(packed_modules_list) == 1
