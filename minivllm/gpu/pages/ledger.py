"""Who has which page. Beside vllm/lora/model_manager.py (v0.22.1), where slots are of one size.

S-LoRA's unified paging is the idea (arXiv:2311.03285).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol


class Lender(Protocol):
    """Whose memory the pages are while no adapter is in them."""

    def choose(self, pages: Iterable[int], most: int) -> list[int]:
        """The first of these pages, at most so many, that could be lent together: nothing is in use there."""

    def lend(self, page: int) -> None:
        """Give a page that was chosen to adapters."""

    def take_back(self, page: int) -> None:
        """No adapter is in the page any more."""


class OwnPages:
    """A lender whose pages are for adapters alone."""

    def choose(self, pages: Iterable[int], most: int) -> list[int]:
        return list(islice(pages, max(most, 0)))

    def lend(self, page: int) -> None:
        """Nobody else has it."""

    def take_back(self, page: int) -> None:
        """Nobody else wants it."""


class GivenPages(OwnPages):
    """A lender of just the pages that rank 0 has given the slot."""

    def __init__(self, pages: Sequence[int]) -> None:
        self._pages = list(pages)

    def choose(self, pages: Iterable[int], most: int) -> list[int]:
        return self._pages[: max(most, 0)]


class PageLedger:
    """Gives slots their pages, and keeps some for adapters that are about to come into one.

    count     pages; those with high numbers go first, since KV blocks with low numbers do
    lender    is asked for each page
    held      slot -> its pages, by rank
    reserved  adapter id -> pages kept for it
    version   counts up whenever a slot's pages change
    """

    def __init__(self, count: int, lender: Lender | None = None) -> None:
        self.count = count
        self.lender: Lender = lender or OwnPages()
        self.held: dict[int, list[int]] = {}
        self.reserved: dict[int, list[int]] = {}
        self.version = 0
        self._unlent = list(range(count))  # ascending

    def reserve(self, adapter_id: int, wanted: int) -> bool:
        """Have at least so many pages kept for an adapter. False, and nothing has changed, if there are too few."""
        kept = self.reserved.get(adapter_id, [])
        more = self._take(wanted - len(kept))
        if more is None:
            return False
        self.reserved[adapter_id] = kept + more
        return True

    def within_reach(self, adapter_id: int, most: int) -> int:
        """How many pages, up to `most`, the adapter has kept or could have now."""
        kept = len(self.reserved.get(adapter_id, []))
        return kept + len(self.lender.choose(reversed(self._unlent), most - kept))

    def release_reserved(self, spare: Iterable[int] = ()) -> None:
        """Give back what is kept for adapters, but for those."""
        for adapter_id in self.reserved.keys() - set(spare):
            self._give_back(self.reserved.pop(adapter_id))

    def assign(self, adapter_id: int, slot: int, wanted: int) -> None:
        """Give a slot just so many pages: those kept for the adapter, its own, then others.

        RuntimeError when there are too few; nothing has changed then.
        """
        pages = self.reserved.get(adapter_id, []) + self.held.get(slot, [])
        more = self._take(wanted - len(pages))
        if more is None:
            raise RuntimeError(
                f"adapter {adapter_id} needs {wanted} pages, but adapters and KV blocks use all but fewer "
                f"of the {self.count} that there are"
            )
        self.reserved.pop(adapter_id, None)
        self._give_back(pages[wanted:])
        self.held[slot] = pages[:wanted] + more
        self.version += 1

    def free_slot(self, slot: int) -> None:
        """Give a slot's pages back."""
        self._give_back(self.held.pop(slot, []))

    def _take(self, wanted: int) -> list[int] | None:
        """So many pages, the highest numbers first; None, and none taken, if there are too few."""
        taken = self.lender.choose(reversed(self._unlent), wanted)
        if len(taken) < wanted:
            return None
        for page in taken:
            self.lender.lend(page)
        gone = set(taken)
        self._unlent = [page for page in self._unlent if page not in gone]
        return taken

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.lender.take_back(page)
        self._unlent = sorted([*self._unlent, *pages])
