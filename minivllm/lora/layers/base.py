"""What every wrapped layer can do. Stands for vllm/lora/layers/base.py and base_linear.py (v0.22.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

if TYPE_CHECKING:
    from minivllm.lora.punica_wrapper import PunicaWrapperBase

Weights = torch.Tensor | list[torch.Tensor | None] | None


class BaseLayerWithLoRA(nn.Module):
    """A base layer with room for S adapters. vLLM: `BaseLayerWithLoRA`.

    Layers are wrapped once, when the model is loaded. From then on adapters come and go by writing slots.

    n_slices        n: how many pairs of A and B an adapter has here (3 for a fused q, k and v)
    a_slots         n buffers (S, E, R, K_i); a slot's A in rows 0..r-1, zeros past them. E is 1, but for experts
    b_slots         n buffers (S, E, N_i, R)
    extra_slots     n buffers (S, rows, columns) for what an adapter may have beside A and B, or none: biases,
                    embeddings of tokens that it adds
    live_ranks      [slice][slot] rank in use, 0 where the slot holds nothing for this slice
    slot_memo       for the backend: slot -> what it worked out, until it is told that the slot has changed
    storage         for the backend: the memory that it keeps slots in, if it is not the layer's own
    tables          what the layer has allocated beside slots
    is_linear       whether a backend may lay out its slots as it likes a linear's
    in_cuda_graphs  whether a step that runs the layer may be captured

    The buffers belong to the punica backend once `set_mapping` has been called: they need not be contiguous,
    nor separate. Only `set_lora`, `reset_lora` and a `SlotWriter` write them. What a layer adds is decided by the
    backend alone; scaling is in B already.
    """

    is_linear: ClassVar[bool] = False
    in_cuda_graphs: ClassVar[bool] = True

    def __init__(self, base_layer: nn.Module, n_slices: int = 1) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.n_slices = n_slices
        self.punica_wrapper: PunicaWrapperBase | None = None
        self.slot_memo: dict[int, object] = {}
        self.storage: tuple[torch.Tensor | None, ...] | None = None
        self.live_ranks: list[list[int]] = []

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def a_slots(self) -> tuple[torch.Tensor, ...]:
        return self.lora_a_stacked

    @property
    def b_slots(self) -> tuple[torch.Tensor, ...]:
        return self.lora_b_stacked

    @property
    def extra_slots(self) -> tuple[torch.Tensor, ...]:
        return ()

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return ()

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Whether this class wraps that layer, whose parts a checkpoint calls by the names in the list."""
        raise NotImplementedError

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty."""
        raise NotImplementedError

    def part_shape(self, part: int) -> tuple[int, int]:
        """How wide A, and how tall B, of a part that adapters name must be: K_i, N_i."""
        raise NotImplementedError

    @property
    def whole_shape(self) -> tuple[int, int]:
        """How wide A, and how tall B, of an adapter for the whole layer must be: K, N."""
        return self.part_shape(0)

    # region lab 2.2: write and clear a slot
    def reset_lora(self, index: int) -> None:
        """Empty a slot, as far as there is anything in it, and tell the backend."""
        for i in range(self.n_slices):
            self._clear_past(index, i, 0)
        self._set_extras(index, None)
        self._tell_backend(index)

    def set_lora(self, index: int, lora_a: Weights, lora_b: Weights, extras: Weights = None) -> None:
        """Put an adapter into a slot in the place of what is there, and tell the backend when all is written.

        lora_a: (r, K) or a list of n, None where a slice has no adapter    lora_b: (N_i, r) likewise
        extras: what `extra_slots` have room for; writing it, or zeros, is `_set_extras`' work

        Ranks may differ by slice. Each slice's part is copied, and nothing of the last adapter is left beside it.
        When a copy fails, `live_ranks` covers all that may have been written, so that `reset_lora` clears it.

        Raises ValueError for a list of another length than n.
        """
        parts_a, parts_b = self.slice_lora_a(as_list(lora_a)), self.slice_lora_b(as_list(lora_b))
        for i, a, b in zip(range(self.n_slices), parts_a, parts_b, strict=True):
            rank = 0 if a is None or b is None else a.shape[-2]
            if rank:
                # Whatever happens while copying, all that may have been written counts as live.
                self.live_ranks[i][index] = max(rank, self.live_ranks[i][index])
                self.a_slots[i][index, :, :rank].copy_(a, non_blocking=True)
                self.b_slots[i][index, :, :, :rank].copy_(b, non_blocking=True)
            self._clear_past(index, i, rank)
        self._set_extras(index, extras)
        self._tell_backend(index)

    def _clear_past(self, index: int, i: int, rank: int) -> None:
        """Zero what slice i of a slot has live beyond `rank`, which is its live rank from then on.

        An adapter of rank 4 does not overwrite all of one of rank 16: 12 rows of A and 12 columns of B are left.
        """
        if (last := self.live_ranks[i][index]) > rank:
            self.a_slots[i][index, :, rank:last] = 0
            self.b_slots[i][index, :, :, rank:last] = 0
        self.live_ranks[i][index] = rank

    # endregion

    def _set_extras(self, index: int, extras: Weights) -> None:
        """Write what comes beside A and B, zeros where there is nothing.   extras: (rows, columns) or a list of n"""
        parts = [None] * self.n_slices if extras is None else self.slice_extras(as_list(extras))
        for buffer, extra in zip(self.extra_slots, parts):
            rows = 0 if extra is None else len(extra)
            if rows:
                buffer[index, :rows].copy_(extra, non_blocking=True)
            buffer[index, rows:] = 0

    def slot_written(self, index: int, ranks: list[int], extra_rows: list[int]) -> None:
        """Somebody else has filled a slot of all n slices and extras, zeros past these ranks and rows."""
        for i, rank in enumerate(ranks):
            self.live_ranks[i][index] = rank
        self._tell_backend(index)

    def _tell_backend(self, index: int) -> None:
        if self.punica_wrapper is not None:
            self.punica_wrapper.slot_changed(self, index)

    def slice_lora_a(self, lora_a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """This tensor-parallel rank's part of each A: all of it, since there is one rank."""
        return lora_a

    def slice_lora_b(self, lora_b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """This tensor-parallel rank's part of each B: all of it, since there is one rank."""
        return lora_b

    def slice_extras(self, extras: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What belongs into each of `extra_slots`, as `slice_lora_b` does for B."""
        return extras

    def set_mapping(self, punica_wrapper: PunicaWrapperBase) -> None:
        """Hand the layer, slots allocated, to the backend that does its arithmetic and may move its buffers."""
        self.punica_wrapper = punica_wrapper
        punica_wrapper.adopt(self)

    def re_home(self, a_slots: tuple[torch.Tensor, ...], b_slots: tuple[torch.Tensor, ...]) -> None:
        """For backends: move what the slots hold into buffers of the same shapes that live elsewhere."""
        held = (*self.a_slots, *self.b_slots)
        for home, buffer in zip((*a_slots, *b_slots), held, strict=True):
            home.copy_(buffer)
        self._bind_slots(a_slots, b_slots)
        self.slot_memo.clear()

    def _bind_slots(self, a_slots: tuple[torch.Tensor, ...], b_slots: tuple[torch.Tensor, ...]) -> None:
        self.lora_a_stacked, self.lora_b_stacked = a_slots, b_slots


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """A base linear with room for S adapters. vLLM: `BaseLinearLayerWithLoRA`.

    n_slices           n: how many projections the layer fuses
    output_slices      their widths N_i
    lora_a_stacked     n buffers (S, 1, R, K), the layer's `a_slots`
    lora_b_stacked     n buffers (S, 1, N_i, R), its `b_slots`
    lora_bias_stacked  n buffers (S, 1, N_i) where adapters may have a bias on B, else None
    wraps              kinds of base layer it takes -> parts the checkpoint must name, None = any number
    """

    is_linear: ClassVar[bool] = True
    wraps: ClassVar[dict[type[LinearBase], int | None]] = {}

    def __init__(self, base_layer: LinearBase) -> None:
        widths = self._slice_widths(base_layer)
        super().__init__(base_layer, len(widths))
        # Called directly: nn.Module's own call costs a no-LoRA batch more than everything else in here.
        self._base_forward = base_layer.forward
        self.input_size = base_layer.input_size
        self.output_size = base_layer.output_size
        self.tp_size, self.tp_rank = base_layer.tp_size, base_layer.tp_rank
        self.output_slices = widths
        self.lora_bias_stacked: tuple[torch.Tensor, ...] | None = None

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    @property
    def extra_slots(self) -> tuple[torch.Tensor, ...]:
        return self.lora_bias_stacked or ()

    def part_shape(self, part: int) -> tuple[int, int]:
        return self.input_size, self.output_slices[part]

    @property
    def whole_shape(self) -> tuple[int, int]:
        return self.input_size, self.output_size

    # region lab 2.1: room for S adapters
    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty. Done once: no adapter that comes later allocates or frees anything.

        max_loras     S, the number of slots; rows of the base model need none
        lora_config   gives R, which is `max_lora_rank`, and the dtype beside that of the base weight (`slot_dtype`)

        Makes `lora_a_stacked`, `lora_b_stacked` and `live_ranks` as the class describes them, on the base weight's
        device. Widths are `input_size` and `output_slices`: a weight that has been packed has no shape to read.
        `_create_bias_slots` has to be called last.
        """
        weight, rank = self.base_layer.weight, lora_config.max_lora_rank
        dtype = lora_config.slot_dtype(weight.dtype)
        device = weight.device
        self.lora_a_stacked = tuple(
            torch.zeros(max_loras, 1, rank, self.input_size, dtype=dtype, device=device)
            for _ in self.output_slices
        )
        self.lora_b_stacked = tuple(
            torch.zeros(max_loras, 1, width, rank, dtype=dtype, device=device) for width in self.output_slices
        )
        self.live_ranks = [[0] * max_loras for _ in self.output_slices]
        self._create_bias_slots(max_loras, lora_config)

    # endregion

    def _create_bias_slots(self, max_loras: int, lora_config: LoRAConfig) -> None:
        if lora_config.bias_enabled:
            self.lora_bias_stacked = tuple(b.new_zeros(max_loras, 1, b.shape[2]) for b in self.lora_b_stacked)

    @property
    def is_plain(self) -> bool:
        """Whether the base layer computes x · Wᵀ + b and nothing else, so that a backend may do it in its place."""
        return type(self.base_layer).forward is LinearBase.forward

    def base_output(self, x: torch.Tensor) -> torch.Tensor:
        """What the base layer alone gives, its bias included.   x: (T, K) -> (T, N)"""
        return self._base_forward(x)[0]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Base output plus each row's own adapter, in the base layer's form.   x: (T, K) -> (T, N), None"""
        y = self.punica_wrapper.apply_linear(self, x)  # (T, N)
        if self.lora_bias_stacked is not None and not self.punica_wrapper.no_lora:
            self.punica_wrapper.add_lora_bias(y, self.lora_bias_stacked, self.output_slices)
        return y, None

    # region lab 2.3: fused linears, with an adapter for each part or one for all
    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Whether this class wraps that layer, as `wraps` says: its kind, and the number of parts for that kind.

        packed_modules_list   the parts of the layer that the checkpoint names one by one

        Of exactly that kind: a model's own subclass may compute something else in its forward pass.
        """
        kind = type(source_layer)
        if kind not in cls.wraps:
            return False
        parts = cls.wraps[kind]
        return parts is None or parts == len(packed_modules_list)

    def _slice_widths(self, base_layer: LinearBase) -> tuple[int, ...]:
        """Widths N_i of the slices that adapters are written to.

        Where `wraps` asks for several parts of such a layer, each has a slice of its own, whose widths are the
        layer's `output_sizes`. Otherwise one slice is as wide as the layer: an adapter for all of it.
        """
        parts = self.wraps.get(type(base_layer))
        if parts is None or parts == 1:
            return (base_layer.output_size,)
        return tuple(base_layer.output_sizes)

    # endregion


def extras_of(weights: LoRALayerWeights | PackedLoRALayerWeights) -> list[torch.Tensor | None]:
    """What an adapter has beside A and B, one entry a slice: a bias or embeddings; no module has both."""
    return [next(iter(part.beside.values()), None) if part else None for part in weights.parts]


def as_list(weights: Weights) -> list[torch.Tensor | None]:
    """One entry a slice."""
    return weights if isinstance(weights, list) else [weights]
