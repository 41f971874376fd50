"""What every wrapped layer can do. Stands for vllm/lora/layers/base.py and base_linear.py (v0.22.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase

if TYPE_CHECKING:
    from minivllm.lora.punica_wrapper import PunicaWrapperBase

Weights = torch.Tensor | list[torch.Tensor | None]


class BaseLayerWithLoRA(nn.Module):
    """A base linear with room for S adapters. vLLM: `BaseLayerWithLoRA` and `BaseLinearLayerWithLoRA`.

    Layers are wrapped once, when the model is loaded. From then on adapters come and go by writing slots.

    n_slices         n: how many projections the layer fuses (3 for q, k and v)
    output_slices    their widths N_i
    lora_a_stacked   n buffers (S, 1, R, K); a slot's A in rows 0..r-1, zeros past them
    lora_b_stacked   n buffers (S, 1, N_i, R)
    live_ranks       [slice][slot] rank in use, 0 where the slot holds nothing for this slice

    The buffers belong to the punica backend once `set_mapping` has been called: they need not be contiguous,
    nor separate. Only `set_lora` and `reset_lora` write them.
    """

    def __init__(self, base_layer: LinearBase) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.input_size = base_layer.input_size
        self.output_size = base_layer.output_size
        self.tp_size, self.tp_rank = base_layer.tp_size, base_layer.tp_rank
        self.output_slices: tuple[int, ...] = (base_layer.output_size,)
        self.punica_wrapper: PunicaWrapperBase | None = None

    @property
    def n_slices(self) -> int:
        return len(self.output_slices)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    # region lab 2.1: room for S adapters
    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty. Done once: no adapter that comes later allocates or frees anything."""
        device = next(self.base_layer.parameters()).device
        dtype, rank = lora_config.lora_dtype, lora_config.max_lora_rank
        if dtype == "auto":
            dtype = next(self.base_layer.parameters()).dtype
        self.lora_a_stacked = tuple(
            torch.zeros(max_loras, 1, rank, self.input_size, dtype=dtype, device=device)
            for _ in self.output_slices
        )
        self.lora_b_stacked = tuple(
            torch.zeros(max_loras, 1, width, rank, dtype=dtype, device=device) for width in self.output_slices
        )
        self.live_ranks = [[0] * max_loras for _ in self.output_slices]

    # endregion

    # region lab 2.2: write and clear a slot
    def reset_lora(self, index: int) -> None:
        """Empty a slot. A slot's zeros matter: what is not overwritten would be the last adapter's."""
        for slice_ranks, lora_a, lora_b in zip(self.live_ranks, self.lora_a_stacked, self.lora_b_stacked):
            lora_a[index] = 0
            lora_b[index] = 0
            slice_ranks[index] = 0

    def set_lora(self, index: int, lora_a: Weights, lora_b: Weights) -> None:
        """Put an adapter into a slot.

        lora_a: (r, K) or a list of n, None where a slice has no adapter    lora_b: (N_i, r) likewise
        """
        self.reset_lora(index)
        parts_a, parts_b = self.slice_lora_a(_as_list(lora_a)), self.slice_lora_b(_as_list(lora_b))
        for i, (a, b) in enumerate(zip(parts_a, parts_b, strict=True)):
            if a is None or b is None:
                continue
            rank = a.shape[0]
            self.lora_a_stacked[i][index, 0, :rank].copy_(a, non_blocking=True)
            self.lora_b_stacked[i][index, 0, :, :rank].copy_(b, non_blocking=True)
            self.live_ranks[i][index] = rank

    # endregion

    def slice_lora_a(self, lora_a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One A a slice, from what the adapter brings. Here that is already so."""
        return lora_a

    def slice_lora_b(self, lora_b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One B a slice, from what the adapter brings. Here that is already so."""
        return lora_b

    def set_mapping(self, punica_wrapper: PunicaWrapperBase) -> None:
        """Hand the layer to the backend that will do its arithmetic, and may move its buffers."""
        self.punica_wrapper = punica_wrapper
        punica_wrapper.adopt(self)

    def re_home(
        self, lora_a_stacked: tuple[torch.Tensor, ...], lora_b_stacked: tuple[torch.Tensor, ...]
    ) -> None:
        """Move what the slots hold into buffers of the same shapes that live elsewhere."""
        old = (*self.lora_a_stacked, *self.lora_b_stacked)
        for theirs, ours in zip((*lora_a_stacked, *lora_b_stacked), old, strict=True):
            theirs.copy_(ours)
        self.lora_a_stacked, self.lora_b_stacked = lora_a_stacked, lora_b_stacked

    def base_output(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """What the base layer alone gives.   x: (T, K) -> (T, N)"""
        y, _ = self.base_layer(x)
        return y if bias is None else y + bias

    # region lab 2.3: forward
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Base output plus each row's own adapter, in the base layer's form.   x: (T, K) -> (T, N), None"""
        return self.punica_wrapper.apply_linear(self, x), None

    # endregion

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Whether this class wraps that layer; `packed_modules_list` are the parts the checkpoint names."""
        raise NotImplementedError


def _as_list(weights: Weights) -> list[torch.Tensor | None]:
    return weights if isinstance(weights, list) else [weights]
