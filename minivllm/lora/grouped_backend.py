"""The backend that a CPU serves with. Stands for vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

import torch

from minivllm.layers.linear import LinearBase
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.slots import Slots

# Rows times ranks side by side up to which one product for everybody is quicker than a product for every run.
FEW = 1024


class GroupedBackend(RunsBackend):
    """One product for everybody where several adapters have few rows, as in decode steps; else one for every run.

    A product of few rows takes as long as its call and the reading of its weights: eight rows of four adapters take 56
    products a decoder layer run by run, and 11 where the ranks of all slots in use lie side by side. Every row is then
    multiplied by all of them, and h is zeroed where a rank is not of the row's own adapter. That is more arithmetic,
    so rows of prompts go run by run.

    used     slots whose ranks lie side by side: those of this step, if they are several, and perhaps of steps before
    several  whether the step's rows have several adapters
    """

    used: tuple[int, ...] = ()
    several = False

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        """A linear's B by columns: those of a short rank are then neighbours in memory."""
        if base is None:
            return slots
        by_column = [b.transpose(2, 3).contiguous().transpose(2, 3) for b in slots.b]
        return SharedSlots(slots.a, by_column).take_over(slots)

    def begin_step(self, mapping: LoRAMapping, slot_table: list[int | None]) -> None:
        super().begin_step(mapping, slot_table)
        now = {slot for slot, _ in self.runs}
        self.several = len(now) > 1
        # Ranks are copied to lie side by side: an adapter that has no rows any more is no reason to copy the others.
        if self.several and not (now <= set(self.used) and len(self.used) <= 2 * len(now)):
            self.used = tuple(sorted(now))

    def linear(self, x: torch.Tensor, base: LinearBase, slots: "SharedSlots") -> torch.Tensor:
        if not self.several or x.dtype != slots.a[0].dtype or len(x) * slots.ranks_in(self.used) > FEW:
            return super().linear(x, base, slots)
        y = base.forward(x)[0]  # (T, N)
        a, owners, slices = slots.side_by_side(self.used)
        h = a.mm(x.t())  # (ranks, T): this way round PyTorch computes it on all cores
        # Zeros take the place of numbers: a row that has overflown does not spoil the rows beside it.
        h = h.masked_fill_(owners != self.token_lora_indices[: len(x)], 0).t()  # (T, ranks)
        for columns, ranks, b in slices:
            y[:, columns].addmm_(h[:, ranks], b)
        return y


class SharedSlots(Slots):
    """Slots that also give the ranks of several slots side by side."""

    _used: tuple[int, ...] | None = None

    def ranks_in(self, used: tuple[int, ...]) -> int:
        """How many ranks lie side by side, of the slice that has most."""
        return max(sum(ranks[slot] for slot in used) for ranks in self.live_ranks)

    def side_by_side(
        self, used: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[slice, slice, torch.Tensor]]]:
        """A of all slices and slots in use (ranks, K); whose each rank is (ranks, 1) int64; and for each slice its
        columns of y, its ranks, and their B (its ranks, N_i). All are copies, kept until a slot or `used` changes.
        """
        if used != self._used:
            all_a, owners, slices, column = [self.a[0][0, 0, :0]], [], [], 0
            for a, b, ranks in zip(self.a, self.b, self.live_ranks):
                live = [(slot, ranks[slot]) for slot in used if ranks[slot]]
                first, columns = len(owners), slice(column, column + b.shape[2])
                all_a += [a[slot, 0, :rank] for slot, rank in live]
                owners += [slot for slot, rank in live for _ in range(rank)]
                if live:
                    all_b = torch.cat([b[slot, 0, :, :rank].t() for slot, rank in live])  # (ranks, N_i)
                    slices.append((columns, slice(first, len(owners)), all_b))
                column = columns.stop
            self._shared = torch.cat(all_a), torch.tensor(owners, device=a.device)[:, None], slices
            self._used = used
        return self._shared

    def changed(self, slot: int) -> None:
        super().changed(slot)
        self._used = None
