"""The backend that computes run by run, a CPU's. Stands for vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

from typing import Any, ClassVar

import torch

from minivllm.layers.linear import LinearBase
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.mapping import compute_runs
from minivllm.lora.ops.by_run import sgmv_expand_slice, sgmv_shrink
from minivllm.lora.slots import Slots


class RunSlots(Slots):
    """Slots of a linear with the A's of all slices in one tensor, so that one product shrinks for all of them.

    all_a   (n, S, R, K)
    widths  the n widths N_i
    """

    def __init__(self, slots: Slots) -> None:
        sizes, _, rank, width = slots.a[0].shape
        self.all_a = slots.a[0].new_zeros(len(slots.a), sizes, rank, width)
        super().__init__(self.all_a.unsqueeze(2).unbind(), slots.b)
        self.take_over(slots)
        self.widths = [b.shape[2] for b in self.b]
        self._live: dict[int, tuple[int, Any]] = {}

    def live(self, slot: int) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """A (n, K, r) and the B's (r, N_i) of a slot, r being the largest live rank; None where nothing is live.

        They are views, kept until the slot changes.
        """
        version, live = self._live.get(slot, (-1, None))
        if version != self.versions[slot]:
            rank = max(ranks[slot] for ranks in self.live_ranks)
            a, bs = self.all_a[:, slot, :rank], [b[slot, 0, :, :rank].t() for b in self.b]
            live = (a.transpose(1, 2), bs) if rank else None
            self._live[slot] = self.versions[slot], live
        return live


class RunsBackend(LoopsBackend):
    """A product for every run of rows with the same adapter, up to its rank and no further.

    The runner orders a batch by adapter, so that a run is an adapter.
    """

    shrink_op: ClassVar = staticmethod(sgmv_shrink)
    expand_op: ClassVar = staticmethod(sgmv_expand_slice)

    def _as_rows(self, adapters: torch.Tensor) -> tuple[Any, ...]:
        """Runs as the ops take them: (B,) starts, (B,) lengths, (B,) adapters, B, longest run, rows."""
        runs = compute_runs(adapters.tolist())
        lengths = [rows.stop - rows.start for _, rows in runs]
        starts = torch.tensor([rows.start for _, rows in runs], dtype=torch.long)
        of_runs = torch.tensor([adapter for adapter, _ in runs], dtype=torch.long)
        longest = max(lengths, default=0)
        return starts, torch.tensor(lengths, dtype=torch.long), of_runs, len(runs), longest, len(adapters)

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        return slots if base is None else RunSlots(slots)

    # region lab 3.6: the whole product of a wrapped linear
    def linear(self, x: torch.Tensor, base: LinearBase, slots: RunSlots) -> torch.Tensor:
        """Base output plus every row's own adapter, run by run.   x: (T, K) -> (T, N)

        The scaling is in B already. A batch without adapters pays for nothing beyond `base.forward`, which answers
        (output, None). Rows of `runs` get one shrink for all slices, and an expand for each (`slots.live`,
        `slots.widths`). Where x is of another dtype than the slots, `add` does it all: it promotes.
        """
        y = base.forward(x)[0]  # (T, N)
        if self.no_lora:
            return y
        if x.dtype != slots.all_a.dtype:
            self.add(y, x, slots, self.token_rows(len(x)))
            return y
        for slot, rows in self.runs:
            if live := slots.live(slot):
                a, bs = live
                h = torch.bmm(x[rows].expand(len(bs), -1, -1), a)  # (n, rows, r)
                for columns, h_i, b in zip(y[rows].split(slots.widths, 1), h.unbind(), bs):
                    columns.addmm_(h_i, b)
        return y

    # endregion
