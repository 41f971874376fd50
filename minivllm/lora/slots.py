"""Room for adapters in one wrapped layer. Stands for the buffers in vllm/lora/layers/base_linear.py (v0.22.1)."""

import itertools
from collections.abc import Sequence

import torch

from minivllm.lora.lora_weights import LoRALayerWeights


class Slots:
    """S slots of one layer, for an adapter each: n pairs of A and B, in memory that never moves.

    a           one buffer for each slice. An adapter's A (r, K_i) is the first rows of a[i][slot, expert]
    b           likewise; its B (N_i, r) is the first columns of b[i][slot, expert]
    beside      what options keep in a slot beside A and B: name -> n tables (S, rows, columns)
    live_ranks  [slice][slot] rank in use
    _live       slot -> what `live` has worked out since the slot was written

    Backends may multiply by all R rows and columns of a slot, whatever the rank of the adapter in it. A layer without
    experts is a layer with one.

    A backend may use a subclass with buffers elsewhere (`Backend.place`): they need not be contiguous, nor separate.
    """

    # region lab 2.1: room for S adapters
    def __init__(self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
        """Slots in buffers that the caller has made, taken as they are. No adapter was written into any slot yet."""
        self.a, self.b = tuple(a), tuple(b)
        self.beside: dict[str, tuple[torch.Tensor, ...]] = {}
        self.live_ranks = [[0] * len(buffer) for buffer in self.a]
        self._live: dict[int, list[tuple[slice, torch.Tensor, torch.Tensor]]] = {}

    @classmethod
    def empty(
        cls,
        slots: int,
        rank: int,
        sizes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device | str,
        experts: int = 1,
    ) -> "Slots":
        """Slots for all adapters that will ever come: none of them allocates or frees anything.

        slots   S adapters at a time, beside rows of the base model    rank   R, the largest that an adapter may have
        sizes   K_i and N_i of each slice                              experts   E

        Numbers lie in the order of their indices, the last one fastest; a GPU's kernels count on it.
        """
        a = [torch.zeros(slots, experts, rank, width, dtype=dtype, device=device) for width, _ in sizes]
        b = [torch.zeros(slots, experts, height, rank, dtype=dtype, device=device) for _, height in sizes]
        return cls(a, b)

    def by_column(self) -> "Slots":
        """These slots, for a backend that reads the columns of B which an adapter has and no other.

        Indices, contents and the memory of A are the same; these slots are not used any more. An adapter of rank r has
        r columns of a B: here they are one piece of memory, r * N numbers, and no buffer is larger than before.

        By hand, R = 4, K = 2, N = 3. An adapter of rank 2 in slot 1 has of the buffers that `empty` makes, counted from
        the first number of each,

            A   8 to 11
            B   12 13, 16 17 and 20 21: three pieces

        To work out: which numbers of B's buffer does it have here?
        """
        b = [buffer.transpose(2, 3).contiguous().transpose(2, 3) for buffer in self.b]  # (S, E, N, R)
        return Slots(self.a, b).take_over(self)

    # endregion

    def take_over(self, other: "Slots") -> "Slots":
        """Copy what is in other slots of the same sizes, and return self."""
        for mine, its in zip((*self.a, *self.b), (*other.a, *other.b), strict=True):
            mine.copy_(its)
        self.beside, self.live_ranks = other.beside, other.live_ranks
        return self

    @property
    def memory(self) -> list[torch.Tensor]:
        """Tensors that together cover all that the slots keep allocated."""
        return [*self.a, *self.b, *(table for tables in self.beside.values() for table in tables)]

    # region lab 2.2: write and clear a slot
    def write(self, slot: int, parts: Sequence[LoRALayerWeights | None]) -> None:
        """Write an adapter into a slot, over what is there, and say so (`changed`) when all is written.

        parts   the n slices' weights, of any rank up to R each; None where the adapter leaves a slice alone

        Weights are copied, with what they have beside A and B (`_write_beside`), and nothing of the last adapter is
        left. When a copy fails, `live_ranks` covers all that may have been written, so that `clear` empties it.

        Raises ValueError for another number of parts than n.
        """
        for i, part in zip(range(len(self.a)), parts, strict=True):
            rank = 0 if part is None else part.lora_a.shape[-2]
            if rank:
                # Whatever happens while copying, all that may have been written counts as live.
                self.live_ranks[i][slot] = max(rank, self.live_ranks[i][slot])
                self.a[i][slot, :, :rank].copy_(part.lora_a, non_blocking=True)
                self.b[i][slot, :, :, :rank].copy_(part.lora_b, non_blocking=True)
            self._clear_past(slot, i, rank)
        self._write_beside(slot, parts)
        self.changed(slot)

    def clear(self, slot: int) -> None:
        """Empty a slot, as far as there is anything in it, and say so."""
        for i in range(len(self.a)):
            self._clear_past(slot, i, 0)
        self._write_beside(slot, [None] * len(self.a))
        self.changed(slot)

    def _clear_past(self, slot: int, i: int, rank: int) -> None:
        """Zero what slice i of a slot has live beyond `rank`, which is its live rank from then on.

        An adapter of rank 4 does not overwrite all of one of rank 16. It leaves 12 rows of A and 12 columns of B.
        """
        if (last := self.live_ranks[i][slot]) > rank:
            self.a[i][slot, :, rank:last] = 0
            self.b[i][slot, :, :, rank:last] = 0
        self.live_ranks[i][slot] = rank

    # endregion

    def _write_beside(self, slot: int, parts: Sequence[LoRALayerWeights | None]) -> None:
        """Write what the parts have beside A and B, and zeros past it."""
        for name, tables in self.beside.items():
            for table, part in zip(tables, parts):
                tensor = part.beside.get(name) if part is not None else None
                rows = 0 if tensor is None else len(tensor)
                if rows:
                    table[slot, :rows].copy_(tensor, non_blocking=True)
                table[slot, rows:] = 0

    def live(self, slot: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Columns of y, A (K, r) and B (r, N_i) of each slice that has something in the slot.

        r is the slice's live rank, E is 1. A and B are views, kept until the slot changes.
        """
        if slot not in self._live:
            ends = list(itertools.accumulate(b.shape[2] for b in self.b))
            self._live[slot] = [
                (slice(end - b.shape[2], end), a[slot, 0, :rank].t(), b[slot, 0, :, :rank].t())
                for end, a, b, ranks in zip(ends, self.a, self.b, self.live_ranks)
                if (rank := ranks[slot])
            ]
        return self._live[slot]

    def changed(self, slot: int) -> None:
        """A slot has been written or cleared: what was worked out from it is forgotten. A subclass may want to know."""
        self._live.pop(slot, None)
