"""The contract of the arithmetic: what wrapped layers ask of a backend.

Stands for PunicaWrapperABC in vllm/lora/punica_wrapper/punica_base.py (v0.22.1), whose names are in minivllm/vllm.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from minivllm.layers.linear import LinearBase
from minivllm.lora.mapping import LoRAMapping, compute_runs, slots_of
from minivllm.lora.slots import Slots

ALL_SLICES = slice(None)


class Backend(ABC):
    """Adds to each row of a step what its own adapter gives. T tokens, P sampled rows; other letters as in `Slots`.

    A backend writes `add` and `expand`. All else works as it is, and may be replaced by something quicker. It knows no
    layer: a layer hands over its slots, and its base linear. Scaling is in B already. One with kernels
    for shrink and expand apart may have `two_step`, too (options/two_step_slots.py looks for it).

    token_lora_indices  (T,) int64 slot of each token, -1 = base
    sampler_indices     (P,) int64 slot of each sampled row, -1 = base
    runs                (slot, rows) of every run of tokens that share an adapter
    no_lora             whether all tokens are base rows. Layers then ask for nothing but `linear`
    tables              what it has allocated ahead, beside slots
    reaches_ends        False only if no adapter of this step has weights where a layer asks (`reaches`)
    leaves_out_ends     True while a step is captured that is for just these

    *Rows* tell `add` and `expand` which adapter each row of y has. A layer gets them from `token_rows`, `sample_rows`
    or `pair_rows`, and hands them on unread. Here they are a tensor, (rows of y,) int64: the slot of each, -1 = base.
    Where a slot has E experts, expert e of slot s is s * E + e. A backend may give them another form (`as_rows`).
    """

    tables: Sequence[torch.Tensor] = ()
    reaches_ends, leaves_out_ends = True, False

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.token_lora_indices = torch.empty(0, dtype=torch.long, device=device)
        self.sampler_indices = torch.empty(0, dtype=torch.long, device=device)
        self.runs: list[tuple[int, slice]] = []
        self.no_lora = True

    # ---- what layers ask for --------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, base: LinearBase, slots: Slots) -> torch.Tensor:
        """Base output plus every row's own adapter, the slices side by side.   x: (T, K) -> (T, N)

        The base product is the backend's to compute. A batch without adapters pays for nothing beyond it.
        """
        y = base.forward(x)[0]  # (T, N)
        if not self.no_lora:
            self.add(y, x, slots, self.token_rows(len(x)))
        return y

    def linear_deferred(
        self, x: torch.Tensor, base: LinearBase, slots: Slots
    ) -> tuple[torch.Tensor, Any | None]:
        """As `linear`, but what adapters add may be left to a kernel that reads y: y without it, and the update.

        None for the update says that y has it already, as here.
        """
        return self.linear(x, base, slots), None

    @abstractmethod
    def add(
        self, y: torch.Tensor, x: torch.Tensor, slots: Slots, rows: Any, slices: slice = ALL_SLICES
    ) -> None:
        """y[:, slice i] += B_i · A_i · x with each row's adapter, over those slices, side by side from column 0.

        y: (rows, >=N)   x: (rows, K). Base rows stay as they are.
        """

    @abstractmethod
    def expand(self, y: torch.Tensor, h: torch.Tensor, slots: Slots, rows: Any) -> None:
        """y += B · h, where h is A · x already. Of slots with one slice.   y: (rows, N)   h: (rows, R)"""

    def token_rows(self, tokens: int) -> Any:
        """The rows of a tensor with one row a token."""
        return self.as_rows(self.token_lora_indices[:tokens])

    def sample_rows(self, samples: int) -> Any:
        """The rows of a tensor with one row for each sampled row."""
        return self.as_rows(self.sampler_indices[:samples])

    def pair_rows(self, adapters: torch.Tensor, slots: Slots) -> Any:
        """The rows of pairs of token and expert.   adapters: (pairs,) int64, s * E + e of each, -1 = base"""
        return self.as_rows(adapters)

    def as_rows(self, adapters: torch.Tensor) -> Any:
        """A tensor of rows in this backend's form."""
        return adapters

    def token_slots(self, tokens: int) -> torch.Tensor:
        """(T,) int64 slot of each token, -1 = base, where the layers compute."""
        return self.token_lora_indices[:tokens]

    def sample_slots(self, samples: int) -> torch.Tensor:
        """(P,) int64 slot of each sampled row, -1 = base, where the layers compute."""
        return self.sampler_indices[:samples]

    def reaches(self, slots: Slots) -> bool:
        """Whether an adapter of this step has weights there. A layer that most leave alone asks first.

        While a step is captured that such layers are left out of (`leaves_out_ends`), the answer may be no.
        """
        return any(ranks[slot] for slot, _ in self.runs for ranks in slots.live_ranks)

    # ---- what managers and layers tell it -------------------------------------------------------------------

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        """Say where a layer's slots shall be; called once a layer. Gives these, or others with the same contents.

        base   what `linear` will be called with; None for a layer that only adds
        """
        return slots

    def begin_step(self, mapping: LoRAMapping, slot_table: list[int | None]) -> None:
        """Note which adapter each row of the coming step has, and which adapter is in each of the S slots.

        ValueError for an adapter that is in none; nothing has changed then.
        """
        tokens = slots_of(mapping.index_mapping, slot_table)
        samples = slots_of(mapping.prompt_mapping, slot_table)
        self.token_lora_indices = torch.tensor(tokens, dtype=torch.long, device=self.device)
        self.sampler_indices = torch.tensor(samples, dtype=torch.long, device=self.device)
        self.runs = compute_runs(tokens)
        self.no_lora = not self.runs

    def sync_slots(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called before a forward pass if anything has changed. What a backend keeps of slots it makes anew here."""
