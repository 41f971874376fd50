"""Adapters without tensors, in the engine's own tiers. Stands for the worker's half of an engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.config import LoRAConfig, SchedulerConfig
from minivllm.gpu.pages.manager import ElasticModelManager
from minivllm.gpu.pages.pool import PagePool
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.lora.tiers import MakeCache, least_recently_used
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.policies.keeping import PolicyCache


@dataclass(frozen=True)
class AdapterSize:
    """An adapter's rank, and its bytes on disk, in memory and in a slot."""

    rank: int
    num_bytes: int


@dataclass(eq=False)
class AdapterRecord:
    """What the tiers hold of an adapter: a `LoRAModel` without weights."""

    id: int
    load_id: int
    rank: int
    name: str = ""
    load_seconds: float = 0.0
    beside: dict[str, Any] = field(default_factory=dict)


class RecordedLayers:
    """Stands for `WrappedModules`: every adapter fits, and a copy is noted.

    copied   ids of the adapters that were copied into a slot since this was last emptied
    """

    def __init__(self) -> None:
        self.copied: list[int] = []

    def accept(self, adapter: AdapterRecord) -> None:
        """Every adapter fits."""

    def write(self, adapter: AdapterRecord, slot: int) -> None:
        self.copied.append(adapter.id)


class RecordedPages(ElasticModelManager):
    """The engine's own dealing of pages, for adapters that are records."""

    def rank_of(self, adapter: AdapterRecord) -> int:
        return adapter.rank


class RecordedWorker(LRUCacheWorkerLoRAManager):
    """The engine's worker; reading gives a record, and is noted.

    ranks   adapter id -> rank
    pages   that adapters lie in; 0 = in slots of one size
    make_cache   of `LRUCacheLoRAModelManager`
    read    ids of the adapters that were read in a step since this was last emptied
    done    ids of the adapters that were read concurrently with steps, for requests that still wait
    taken   ids of those of them that a step has put into memory since this was last emptied
    """

    def __init__(
        self,
        lora_config: LoRAConfig,
        scheduler_config: SchedulerConfig,
        ranks: Mapping[int, int],
        pages: int = 0,
        make_cache: MakeCache = least_recently_used,
    ) -> None:
        super().__init__(
            SimpleNamespace(lora_config=lora_config, scheduler_config=scheduler_config), device="cpu"
        )
        self.ranks = ranks
        self.layers = RecordedLayers()
        pool = PagePool(lora_config.max_loras, lora_config.max_lora_rank, "cpu")
        if pages:
            pool.bind([torch.empty(pages)], 1)  # a page of one element; nothing is ever written
        make_manager = RecordedPages if pages else LRUCacheLoRAModelManager
        self.manager = self._adapter_manager = make_manager(
            SimpleNamespace(supports_lora=True),
            max_num_seqs=0,
            max_num_batched_tokens=0,
            vocab_size=0,
            lora_config=lora_config,
            device="cpu",
            make_backend=lambda *sizes: SimpleNamespace(pool=pool),
            make_cache=make_cache,
            wrap=lambda *model: self.layers,
        )
        self.manager.listeners.clear()  # without the engine's statistics
        self.read: list[int] = []
        self.done: set[int] = set()
        self.taken: list[int] = []
        self._load_ids = itertools.count(1)
        self._in_slots: tuple[list[int], frozenset[int]] | None = None
        self.source = self

    def load(self, lora_request: LoRARequest) -> AdapterRecord:
        """As `AdapterSource.load`."""
        adapter_id = lora_request.lora_int_id
        if adapter_id in self.done:
            self.done.remove(adapter_id)
            self.taken.append(adapter_id)
        else:
            self.read.append(adapter_id)
        return self._record(adapter_id)

    def _record(self, adapter_id: int) -> AdapterRecord:
        return AdapterRecord(adapter_id, next(self._load_ids), self.ranks[adapter_id])

    def bring_in(self, requests: dict[int, LoRARequest]) -> None:
        """Have a step's adapters in slots, as `set_active_adapters` does.   requests: by adapter id

        The same adapters as in the step before, in the same slots, were used last anyway: nothing would change but for
        a policy that counts uses.
        """
        slots = self.manager.tiers.slots
        if (list(slots), frozenset(requests)) != self._in_slots or isinstance(slots, PolicyCache):
            self._apply_adapters(requests.values())
            self._in_slots = list(slots), frozenset(requests)

    def add_ahead(self, adapter_id: int) -> None:
        """Put an adapter that was read, and no request waits for, into memory, if there is room or one to evict."""
        self.done.discard(adapter_id)
        if (
            len(self.manager) < self.manager.capacity
            or not self.manager.list_adapters().keys() <= self.manager.kept
        ):
            self.manager.add_adapter(self._record(adapter_id))
