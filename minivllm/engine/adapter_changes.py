"""Reloads and unloads, which wait for requests in flight.

Stands for what vllm/entrypoints/openai/models/serving.py (v0.22.1) does at once, whoever is in flight.
"""

from dataclasses import replace

from minivllm.core.output import RELOAD_PENDING
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter import Adapter, AdapterVersion
from minivllm.errors import recoverable
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager


class AdapterChanges:
    """Adapters by id, and their changes: ordered now, done when no request stands in the way.

    worker     reads, removes and pins adapters. It is the registry's own: callers get `engine.runner.lora_manager`,
               which leads here
    manager    the same adapters in memory and in slots
    adapters   id -> record
    by_name    each of its names -> id
    noted      ids of the adapters that may have a reload, a failure or an unload: nobody has to walk through all
    pinned     ids of the adapters that are to keep a slot, in one yet or not. `manager.pinned_adapters` are in one
    """

    def __init__(self, scheduler: Scheduler, worker: LRUCacheWorkerLoRAManager) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.manager = worker.manager
        self.adapters: dict[int, Adapter] = {}
        self.by_name: dict[str, int] = {}
        self.noted: set[int] = set()
        self.pinned: set[int] = set()

    def _noted(self) -> list[Adapter]:
        """Adapters with a reload, a failure or an unload, by id; others are noted no longer."""
        noted = [self.adapters[adapter_id] for adapter_id in sorted(self.noted)]
        noted = [a for a in noted if a.reloads or a.failures or a.leaving]
        self.noted = {adapter.id for adapter in noted}
        return noted

    # region lab 7.5: changes that wait for requests in flight
    def may_run(self, request: Request) -> str | None:
        """None, or why a waiting request may not be admitted: RELOAD_PENDING.

        It may not while the reload that begins its generation is to come (`reloads`). It may not, either, while
        unfinished requests of its adapter are of an earlier generation. Base has no record.
        """
        adapter = self.adapters.get(request.adapter_id)
        if adapter is None:
            return None
        generation = request.adapter_generation
        waits = generation in adapter.reloads or self._in_flight(adapter, before=generation)
        return RELOAD_PENDING if waits else None

    def _with_reload(self, adapter: Adapter, order: LoRARequest) -> Adapter:
        """A copy of the record (`replace`) with one generation more, and the order of its reload in `reloads`.

        The record itself stays as it is, and so does its dict of `reloads`. An interrupt may come between any two
        lines, and half an order is none.
        """
        generation = adapter.generation + 1
        return replace(adapter, generation=generation, reloads={**adapter.reloads, generation: order})

    def remove_lora(self, adapter_id: int) -> bool:
        """Unload: at once, or when the requests that use it have finished. False for an unknown id.

        From now on it is `leaving` (and `noted`), and new requests are refused.
        """
        adapter = self.adapters.get(adapter_id)
        if adapter is None:
            return False
        self.noted.add(adapter_id)
        adapter.leaving = True
        self.settle()
        return True

    def settle(self) -> None:
        """Do the reloads, by generation, and then the unload that no request stands in the way of, of all `_noted`.

        A reload waits for the unfinished requests of generations before its own. It is done once (`_reload`), and
        then its order is gone. An unload waits for all unfinished requests of its adapter. Then the worker removes it
        from its slot and from memory (`remove_adapter`), and it is forgotten here (`_forget`). Should the worker fail,
        it is not: the next settling tries again.
        """
        for adapter in self._noted():
            for generation in sorted(adapter.reloads):
                if not self._in_flight(adapter, before=generation):
                    self._reload(adapter, generation)
                    del adapter.reloads[generation]
            if adapter.leaving and not self._in_flight(adapter):
                self.worker.remove_adapter(adapter.id)
                self._forget(adapter)

    def _reload(self, adapter: Adapter, generation: int) -> None:
        """Have the worker read it again (`add_adapter`); nobody who runs may lose a place to it (`_spare_who_runs`).

        What is not in memory (`manager.list_adapters`) is left to the next step that needs it, when there is room. Once
        it is read, versions before it are of no use any more (`_note_read`).

        After any error (`recoverable`) the worker still has the old weights. The error is kept in `failures` for the
        requests of this generation. The adapter's own is then at least the one after it: whoever comes next does not
        share their fate. The record goes back to the version before the order (`_go_back`), or it would name a folder
        that was never read.
        """
        if adapter.id not in self.manager.list_adapters():
            return
        self._spare_who_runs()
        try:
            self.worker.add_adapter(adapter.reloads[generation])
            self._note_read(adapter, generation)
        except BaseException as error:
            adapter.failures[generation] = recoverable(error)
            adapter.generation = max(generation + 1, adapter.generation)
            self._go_back(adapter, generation)

    def _in_flight(self, adapter: Adapter, before: int | None = None) -> bool:
        """Whether unfinished requests use the adapter, of a generation below `before` if that is given.

        The scheduler counts them in `in_flight`, also those that wait or were preempted. It has adapter id ->
        generation -> count, and no entry where there are none.
        """
        generations = self.scheduler.in_flight.get(adapter.id, ())
        return any(before is None or generation < before for generation in generations)

    # endregion

    def _note_read(self, adapter: Adapter, generation: int) -> None:
        """Weights of this generation are in memory: nobody goes back to a version before them."""
        adapter.was_read = True
        if adapter.before:
            adapter.before = {g: version for g, version in adapter.before.items() if g > generation}

    def _go_back(self, adapter: Adapter, generation: int) -> bool:
        """The version that this generation began with cannot be read. False if none is known that came before it.

        The record takes the version before, with those of its names that no other adapter has taken meanwhile. Where
        another reload has been ordered since, the record is of that one, and a failure of it leads further back.
        """
        version = adapter.before.get(generation)
        later = min((g for g in adapter.before if g > generation), default=None)
        if version is not None and later is None:
            free = (name for name in version.names if self.by_name.get(name, adapter.id) == adapter.id)
            self._set_version(adapter, version._replace(names=tuple(free)))
        elif version is not None:
            adapter.before[later] = version
        elif later is not None:
            del adapter.before[later]
        adapter.before.pop(generation, None)
        return version is not None

    def _go_back_from_unread(self, adapter: Adapter) -> bool:
        """As `_go_back`, of the version that was to be read now: a reload of it may have been left to this reading."""
        current = adapter.current_generation
        return self._go_back(adapter, max((g for g in adapter.before if g <= current), default=current))

    def _set_version(self, adapter: Adapter, version: AdapterVersion) -> None:
        old, adapter.version = adapter.version, version
        for name in set(old.names).difference(version.names):
            self.by_name.pop(name, None)
        self.by_name |= dict.fromkeys(version.names, adapter.id)

    def failures(self) -> dict[tuple[int, int], BaseException]:
        """(adapter id, generation) -> error of the reloads that have failed, but for those that were `answered_for`."""
        return {(a.id, generation): e for a in self._noted() for generation, e in a.failures.items()}

    def answered_for(self, failure: tuple[int, int]) -> None:
        """Everybody who waited for that reload has ended. Not before: who is left would get the old weights."""
        adapter_id, generation = failure
        if adapter_id in self.adapters:
            self.adapters[adapter_id].failures.pop(generation, None)

    def _spare_who_runs(self) -> None:
        """Between steps requests come and go; what runs now, or waits to be pinned, must not be evicted."""
        running = {request.adapter_id for request in self.scheduler.running if request.adapter_id}
        self.manager.set_in_use(running | self.pinned)

    def _forget(self, adapter: Adapter) -> None:
        """Drop all that was noted of it: under the same id and names there may soon be another adapter."""
        self.manager.tell("forget", adapter.id)
        for name in adapter.names:
            self.by_name.pop(name, None)
        self.noted.discard(adapter.id)
        self.pinned.discard(adapter.id)
        del self.adapters[adapter.id]
