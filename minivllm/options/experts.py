"""Adapters on experts. Stands for vllm/lora/layers/fused_moe.py (v0.22.1)."""

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.fused_moe import ExpertPairs, FusedMoE
from minivllm.lora.backend import Backend
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights, pack_moe
from minivllm.lora.slots import Slots
from minivllm.options.expert_parts import DOWN, GATE_UP, OTHER_SPELLING, by_part, parts_of_experts
from minivllm.options.experts_arithmetic import W2, W13, ExpertsArithmetic
from minivllm.options.option_layer import OptionLayer
from minivllm.options.sharded_experts import ShardedExperts


class FusedMoEWithLoRA(OptionLayer):
    """The experts of a layer with room for S adapters of each of them. vLLM: the same name.

    n_slices        3: w1 (gate), w2 (down) and w3 (up), of all E experts
    lora_a_stacked  3 buffers (S, E, R, K_i), K being H, I, H
    lora_b_stacked  3 buffers (S, E, N_i, R), N being I, H, I
    arithmetic      how they are computed, once `create_lora_weights` was called

    A pair of a token and an expert has the adapter in the token's slot s, and of that what it has for expert e. So it
    is a row with one of S * E adapters, number s * E + e, and backends add it up as they do for a linear.
    """

    def __init__(self, base_layer: FusedMoE) -> None:
        sizes = self._shapes_of_parts(base_layer.hidden_size, base_layer.intermediate_size)
        super().__init__(base_layer, sizes)
        self.share = base_layer.tp.adapter_share(base_layer, len(sizes))
        self.num_experts = base_layer.num_experts
        self.tp_size, self.tp_rank = base_layer.tp_size, base_layer.tp_rank
        self.arithmetic: ExpertsArithmetic | None = None

    @staticmethod
    def _shapes_of_parts(hidden: int, inner: int) -> list[tuple[int, int]]:
        """K_i and N_i of every slice."""
        return [(hidden, inner), (inner, hidden), (hidden, inner)]

    def part_shape(self, part: int) -> tuple[int, int]:
        """As for a linear. Parts are counted by expert: slice i of expert e is part n_slices * e + i."""
        return self.slice_sizes[part % self.n_slices]

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty. With `fully_sharded_loras` processes share out both A and B."""
        weight, self.max_rank = self.base_layer.w13_weight, lora_config.max_lora_rank
        is_sharded = lora_config.fully_sharded_loras and self.tp_size > 1
        self.arithmetic = (ShardedExperts if is_sharded else ExpertsArithmetic)(
            self.base_layer, self.share, self.max_rank
        )
        self.share = self.arithmetic.share
        dtype = lora_config.slot_dtype(weight.dtype)
        sizes, experts = self.share.sizes(self.slice_sizes), self.num_experts
        slots = Slots.empty(max_loras, self.max_rank, sizes, dtype, weight.device, experts)
        self.slots = self.arithmetic.cut_slots(slots)

    def set_mapping(self, punica_wrapper: Backend) -> None:
        self.backend = punica_wrapper
        self.slots = self.arithmetic.place(self.slots, punica_wrapper)

    # ---- an adapter's weights -------------------------------------------------------------------------------

    def also_called(self, name: str) -> list[str]:
        """The layer itself, which is refused; fused parameters; and its parts as other checkpoints spell them."""
        split = [target.rpartition(".") for target in self.targets]
        respelt = [f"{expert}.{OTHER_SPELLING[last]}" for expert, _, last in split if last in OTHER_SPELLING]
        return [name, f"{name}.{GATE_UP}", f"{name}.{DOWN}", *respelt]

    def by_slice(self, found: dict[str, LoRALayerWeights]) -> list[LoRALayerWeights | None]:
        """One entry for each part of each expert, whatever the adapter calls them."""
        return by_part(found, self)

    def pack(self, parts: list[LoRALayerWeights | None]) -> PackedLoRALayerWeights:
        """The parts of all experts as slices of the layer: A (E, r, K), B (E, N, r) each."""
        return self.arithmetic.own(pack_moe(parts, next(iter(self.targets))).optimize(), self.slots)

    @property
    def w13_lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.slots.a[W13]

    @property
    def w13_lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.slots.b[W13]

    @property
    def w2_lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.slots.a[W2]

    @property
    def w2_lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.slots.b[W2]

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """The base layer's stages, adapters added to what w13 and w2 give.   x: (T, H), router_logits: (T, E) -> (T, H)

        A batch none of whose adapters has experts is the base layer's alone.
        """
        base = self.base_layer
        if not self.arithmetic.is_reached(self.slots):
            return base(x, router_logits)
        pairs = base.route(router_logits)
        rows = self.backend.pair_rows(self._adapters_of(pairs, len(x)), self.slots)
        x = x[pairs.rows]  # (P, H)
        gate_up = base.w13(x, pairs)  # (P, 2I)
        self.arithmetic.add(gate_up, x, self.slots, rows, W13)
        inner = base.act_fn(gate_up)  # (P, I)
        down = base.w2(inner, pairs)  # (P, H)
        self.arithmetic.add(down, inner, self.slots, rows, W2)
        return base.combine(down, pairs)

    def _adapters_of(self, pairs: ExpertPairs, tokens: int) -> torch.Tensor:
        """(P,) int64 s * E + e of each pair, -1 = base"""
        slots = self.backend.token_slots(tokens)[pairs.rows]  # (P,)
        return (slots * self.num_experts + pairs.experts).masked_fill(slots < 0, -1)

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """Experts, unless the checkpoint has w1 and w3 in one."""
        return type(layer) is FusedMoE and parts != 1

    @classmethod
    def parts_in(cls, model: nn.Module, name: str, layer: nn.Module) -> list[str] | None:
        """`experts.0.w1`, `experts.0.w2`, ... by expert, as the model's checkpoints name them."""
        if not cls.takes(layer, 1 if getattr(model, "is_3d_moe_weight", False) else 2):
            return None
        return parts_of_experts(model, name, layer)


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """The same for models whose checkpoints, and so adapters, have gate and up in one. vLLM: the same name.

    n_slices        2: w13 (gate, then up) and w2 (down), of all E experts
    lora_a_stacked  2 buffers (S, E, R, K_i), K being H, I
    lora_b_stacked  2 buffers (S, E, N_i, R), N being 2I, H
    """

    @staticmethod
    def _shapes_of_parts(hidden: int, inner: int) -> list[tuple[int, int]]:
        return [(hidden, 2 * inner), (inner, hidden)]

    def pack(self, parts: list[LoRALayerWeights | None]) -> PackedLoRALayerWeights:
        of_three = [part for pair in zip(parts[0::2], parts[1::2]) for part in (*pair, None)]
        packed = pack_moe(of_three, next(iter(self.targets))).optimize()
        packed = PackedLoRALayerWeights.from_parts(packed.module_name, packed.rank, packed.parts[:2])
        return self.arithmetic.own(packed, self.slots)

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """Experts whose checkpoint has w1 and w3 in one."""
        return type(layer) is FusedMoE and parts == 1
