"""An adapter is read by all ranks, or by none. vLLM (v0.22.1) has each read it in its step, see `add_lora` of
vllm/v1/executor/abstract.py; there, one that cannot ends the engine.
"""

import itertools
import os
import weakref
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.names import find_adapter_folder
from minivllm.lora.request import LoRARequest
from minivllm.parallel.other_ranks import OtherRanks


class Assignment(NamedTuple):
    """The slot of an adapter, as rank 0 has decided it.

    number   that the adapter was read by    pages   of the slot, where slots are made of pages
    """

    slot: int
    number: int
    pages: tuple[int, ...] = ()


class SharedSource(AdapterSource):
    """Where rank 0 gets adapters from: it has the other ranks read them at the same time as its own source.

    Each has its own part of the weights in memory. Rank 0 decides which of them are in which slot.
    """

    def __init__(self, source: AdapterSource, others: OtherRanks) -> None:
        self.source, self._others = source, others
        self._numbers = itertools.count(1)
        # Adapter -> the number that the others know it by.
        self._number_of: weakref.WeakKeyDictionary[LoRAModel, int] = weakref.WeakKeyDictionary()
        self._dropped: deque[int] = deque()  # numbers that nobody here has any more
        self._assigned: dict[int, Assignment] = {}  # by adapter id, that the others know
        self.manager = source.manager
        self._pool = getattr(self.manager.punica_wrapper, "pool", None)

    def check(self, lora_request: LoRARequest) -> LoRAModel:
        return self.source.check(lora_request)

    def load(self, lora_request: LoRARequest) -> LoRAModel:
        """As `AdapterSource.load`, in any thread; also ValueError when another rank cannot read it."""
        if lora_request.lora_tensors is None:
            try:
                sources = self.manager.extensions.folder_sources
                folder = find_adapter_folder(lora_request.lora_path, sources)
            except Exception:  # whatever it is, it is raised again here, and reported
                return self.source.load(lora_request)
            # One folder for all, whatever a name may lead to by and by.
            lora_request = replace(lora_request, lora_path=folder)
        number = next(self._numbers)
        answer = self._others.ask(number, "read", lora_request, stamp_of(lora_request))
        try:
            lora = self.source.load(lora_request)
            for rank, said in answer.result().items():
                refusal = f"adapter '{lora_request.lora_name}' cannot be loaded on rank {rank}: {said}"
                self.manager.tell("refuse", lora_request.lora_int_id, reason=refusal)
                raise ValueError(refusal)
        except BaseException:
            self._dropped.append(number)
            raise
        self._number_of[lora] = number
        weakref.finalize(lora, self._dropped.append, number).atexit = False
        return lora

    def changes(self) -> tuple[dict[int, Assignment] | None, list[int]]:
        """Since the last call, for the others' next step.

        The slots of all adapters, by adapter id, or None if they are the same; and numbers of adapters to forget.
        """
        adapters, slots = self.manager.tiers.memory, self.manager.tiers.slots
        pages = self._pool.ledger.held if self._pool is not None else {}
        assigned = {
            i: Assignment(slot, self._number_of[adapters[i]], tuple(pages.get(slot, ())))
            for i, slot in slots.items()
        }
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        is_new, self._assigned = assigned != self._assigned, assigned
        return assigned if is_new else None, dropped


def stamp_of(lora_request: LoRARequest) -> object:
    """What tells whether an adapter's files have changed."""
    if not os.path.isdir(lora_request.lora_path):
        return None
    with os.scandir(lora_request.lora_path) as entries:
        stats = {entry.name: entry.stat() for entry in entries}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
