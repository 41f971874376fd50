"""The records of adapters: who owns which id and name, and what is asked of adapters while requests run.

Stands for the adapter half of vllm/entrypoints/openai/models/serving.py (v0.22.1), which keeps names only, and for
`pin_lora` of vllm/v1/worker/gpu_worker.py, which never waits. There changes are made at once, whatever is in flight.
"""

from labs.kit.overlay import Todo
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from minivllm.core.output import RELOAD_PENDING
from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.engine.adapter import Adapter, AdapterVersion
from minivllm.errors import RuntimeRefusal, is_leaving, is_recoverable, recoverable
from minivllm.lora.loading import real_folder
from minivllm.lora.request import AtLeast, LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """The records of all adapters that requests may name: the one class that changes them.

    queues     the unfinished requests, which may use adapters: the scheduler's
    worker     reads, removes and pins adapters. It is the registry's own: callers get `engine.runner.lora_manager`,
               which leads here
    manager    the same adapters in memory and in slots
    find_by_name   (name, base model, known names) -> the request of an adapter that nobody has named yet
                   (`minivllm.sources.find_by_name`); None: requests bring their adapter's folder
    look_up_parts  (request, this registry) -> as `compose`; None: no adapter is made of others

    adapters   id -> record
    by_name    each of its names -> id
    noted      ids of the adapters that may have a reload, a failure or an unload: nobody has to walk through all
    aliases    id that callers give -> id of the record that they mean by now; none here (`minivllm.versions`)
    pinned     ids of the adapters that are to keep a slot, in one yet or not. `manager.pinned_adapters` are in one
    """

    def __init__(
        self,
        queues: RequestQueues,
        worker: LRUCacheWorkerLoRAManager,
        find_by_name: Callable[[str, str, Collection[str]], LoRARequest] | None = None,
        look_up_parts: "Callable[[LoRARequest, AdapterRegistry], LoRARequest] | None" = None,
    ) -> None:
        self.queues = queues
        self.worker = worker
        self.manager = worker.manager
        self.adapters: dict[int, Adapter] = {}
        self.by_name: dict[str, int] = {}
        self.noted: set[int] = set()
        self.aliases: dict[int, int] = {}
        self.pinned: set[int] = set()
        self._find_by_name = find_by_name
        self._look_up_parts = look_up_parts

    # ---- naming ---------------------------------------------------------------------------------------------

    def examine(self, lora_request: LoRARequest) -> Mapping[str, Any]:
        """What options find of an adapter before a request of it is taken (`LoRAModel.beside`); nothing changes.

        ValueError: id, name or folder contradict what is registered, or the adapter does not fit. FileNotFoundError:
        it is not there.
        """
        if lora_request.awaits_version:
            lora_request = self.named(lora_request.lora_name)
        try:
            if lora_request.is_made_of_others:
                lora_request = self.compose(lora_request)
            adapter = self.identify(lora_request)
        except ValueError as error:
            self.manager.tell("refuse", lora_request.lora_int_id, reason=str(error))
            raise
        if adapter is None or lora_request.load_inplace:
            return self.worker.source.check(lora_request).beside
        # Of the reload that is to come, if there is one, else of what is in memory.
        lora = None if adapter.reloads else self.manager.get_adapter(adapter.id)
        return adapter.found if lora is None else lora.beside

    def compose(self, lora_request: LoRARequest) -> LoRARequest:
        """A request as it is to be taken now, whose adapter is made of others: with these as they are read now, and as
        a reload if they are others than last time.

        ValueError for a part that contradicts what is registered, is not known or is being unloaded.
        """
        return lora_request if self._look_up_parts is None else self._look_up_parts(lora_request, self)

    def identify(self, lora_request: LoRARequest) -> Adapter | None:
        """The adapter with this id, if there is one. ValueError if it is another one, or on its way out."""
        name, adapter_id = lora_request.lora_name, lora_request.lora_int_id
        owner_id = self.by_name.get(name, adapter_id)
        if owner_id != adapter_id:
            raise ValueError(
                f"adapter name '{name}' belongs to lora_int_id {owner_id} ({self.adapters[owner_id].owner}), "
                f"not {adapter_id}; use that id or another name"
            )
        adapter = self.adapters.get(adapter_id)
        if adapter is None:
            return None
        if adapter.leaving:
            raise is_leaving(name, adapter_id)
        if not lora_request.load_inplace and adapter.is_elsewhere(lora_request.lora_path):
            path = lora_request.lora_path
            now = f", which leads to '{real_folder(path)}' by now" if path == adapter.path else ""
            raise ValueError(
                f"lora_int_id {adapter_id} belongs to adapter '{adapter.request.lora_name}' at "
                f"'{adapter.request.lora_path}' ({adapter.owner}), not to '{path}'{now}; "
                "give every adapter its own id, remove that one first, or pass load_inplace=True to replace it"
            )
        return adapter

    def register(
        self, lora_request: LoRARequest, owner: str, found: Mapping[str, Any]
    ) -> tuple[LoRARequest, int]:
        """The adapter a new request means, and its generation; the first mention registers it.

        found   by `examine`

        A second name for the same id and folder is an alias. A reload from another folder brings its own name: the
        names before it led to other weights, and are free.
        """
        if lora_request.awaits_version:
            return self._register_wait(lora_request, owner, found)
        if lora_request.is_made_of_others:
            lora_request = self.compose(lora_request)
        name, adapter_id = lora_request.lora_name, lora_request.lora_int_id
        adapter = self.adapters.get(adapter_id)
        before = adapter.names if adapter else ()
        if adapter is None:
            request = self.worker.source.resolve(lora_request)
            adapter = Adapter(AdapterVersion(request, lora_request.lora_path, found), owner)
        elif lora_request.load_inplace:
            self.noted.add(adapter_id)
            adapter = self._with_reload_of(adapter, lora_request, found)
        if name not in adapter.names:
            adapter.version = adapter.version._replace(names=(*adapter.names, name))
        # All of a change at once: an interrupt may come between any two lines.
        self.adapters[adapter_id] = adapter
        for old in set(before).difference(adapter.names):
            self.by_name.pop(old, None)
        self.by_name[name] = adapter_id
        return adapter.request, adapter.generation

    def _register_wait(
        self, lora_request: LoRARequest, owner: str, found: Mapping[str, Any]
    ) -> tuple[LoRARequest, int]:
        """As `register`, of a request that waits for a version; `find` gives none here (`minivllm.versions`)."""
        raise NotImplementedError

    def _with_reload_of(self, adapter: Adapter, reload: LoRARequest, found: Mapping[str, Any]) -> Adapter:
        """A copy of the record with one more reload to come, and what new requests find of it."""
        request, names = self.worker.source.resolve(reload), adapter.names
        at_once = replace(reload, lora_path=request.lora_path)  # it may be read in a step, long after
        if reload.lora_name in names or not adapter.is_elsewhere(reload.lora_path):
            request = replace(request, lora_name=adapter.request.lora_name)
        else:
            names = ()
        version = AdapterVersion(request, reload.lora_path, found, names)
        later = self._with_reload(adapter, at_once)
        return replace(later, version=version, before={**adapter.before, later.generation: adapter.version})

    def named(self, name: str) -> LoRARequest | None:
        """The adapter of that name, under that name; None if none has it."""
        if name not in self.by_name:
            return None
        request = self.adapters[self.by_name[name]].request
        # The one it was loaded under may be another adapter's by now.
        return request if request.lora_name == name else replace(request, lora_name=name)

    def newest(self, lora_request: LoRARequest) -> LoRARequest:
        """The request of the weights that an adapter has by now: the same here, where an id is one adapter's."""
        return lora_request

    def update_lora(self, preempt: Callable[[int], None], *args: Any, **options: Any) -> int:
        """Replace an adapter's weights while requests run.   preempt: `Scheduler.preempt`"""
        raise RuntimeRefusal("update_lora needs minivllm.versions, which is not there")

    def find(self, name: str, base_model: str) -> LoRARequest:
        """The adapter of that name; one that is not known yet is found by its name. ValueError if nobody knows it."""
        if isinstance(name, AtLeast):
            raise ValueError("AtLeast needs minivllm.versions, which is not there")
        if known := self.named(name):
            return known
        if self._find_by_name is None:
            known = ", ".join(sorted(self.by_name)[:8]) or "none"
            raise ValueError(
                f"adapter '{name}' is unknown (known: {known}); give a LoRARequest with its folder"
            )
        return self._find_by_name(name, base_model, self.by_name)

    def name_of(self, adapter_id: int) -> str:
        adapter = self.adapters.get(adapter_id)
        return adapter.request.lora_name if adapter else str(adapter_id)

    # ---- coming and going -----------------------------------------------------------------------------------

    def request_ended(self, adapter_id: int) -> None:
        """Do what waited for a request's end; forget an adapter that was named but never read."""
        adapter = self.adapters.get(adapter_id)
        if adapter is not None and not adapter.was_read:
            self.release_unused(adapter_id)
        self.settle()

    def release_unused(self, adapter_id: int) -> None:
        """Forget an adapter that is not in memory and that no request uses: its id and names are free again."""
        adapter = self.adapters.get(adapter_id)
        if adapter is None:
            return
        if adapter_id in self.manager.list_adapters():
            adapter.was_read = True
        elif not self._in_flight(adapter):
            self._forget(adapter)

    def could_not_be_read(self, adapter_id: int) -> None:
        """A step's adapter could not be brought in, and the requests of that step have ended.

        If a reload was left to this step, that reload has failed, and the record goes back. Otherwise there is nothing
        to go back to, and the adapter is forgotten once no request uses it.
        """
        adapter = self.adapters.get(adapter_id)
        if adapter is None or adapter_id in self.manager.list_adapters():
            return
        if not (self._go_back_from_unread(adapter) and adapter.was_read):
            self.release_unused(adapter_id)

    def add_lora(self, lora_request: LoRARequest, found: Mapping[str, Any] | None = None) -> bool:
        """Load ahead of the first request; errors as in `examine`. True: it is in memory.

        found   by `examine`, if it was asked

        With `load_inplace` it is read again: at once, or when the requests that use it have finished. In the latter
        case the answer is False. RuntimeError when all that memory holds is pinned or in use. After an error the
        adapter is known as before.
        """
        if lora_request.is_made_of_others:
            lora_request = self.compose(lora_request)
        known = self.adapters.get(lora_request.lora_int_id)
        before = known and known.version
        found = self.examine(lora_request) if found is None else found
        request, generation = self.register(lora_request, "add_lora", found)
        adapter = self.adapters[request.lora_int_id]
        registered = adapter.version
        try:
            self.settle()
            if error := adapter.failures.get(generation):
                if not self._in_flight(adapter):  # else requests have yet to end with it
                    self.answered_for((adapter.id, generation))
                raise error
            if generation in adapter.reloads:
                return False
            if not self._has_memory_for(adapter):
                if lora_request.load_inplace:
                    self._go_back(adapter, generation)
                raise RuntimeRefusal(
                    f"adapter '{request.lora_name}' cannot be loaded: the {self.manager.capacity} adapters in "
                    "memory are all pinned or in use; unpin one, wait, or raise max_cpu_loras"
                )
            self._read(adapter)
            return True
        except BaseException:
            # The name may be a new one. A reload has gone back already, and so has a version that cannot be read.
            if adapter is known and adapter.version is registered:
                self._set_version(adapter, before)
            raise
        finally:
            if not adapter.was_read:
                self.release_unused(adapter.id)

    # ---- reloads and unloads wait for requests in flight --------------------------------------------------------

    def _noted(self) -> list[Adapter]:
        """Adapters with a reload, a failure or an unload, by id; others are noted no longer."""
        noted = [self.adapters[adapter_id] for adapter_id in sorted(self.noted)]
        noted = [a for a in noted if a.reloads or a.failures or a.leaving]
        self.noted = {adapter.id for adapter in noted}
        return noted

    # region lab 7.5: changes that wait for requests in flight
    def why_wait(self, request: Request) -> str | None:
        """None, or why a waiting request may not be admitted: RELOAD_PENDING.

        It may not while the reload that begins its generation is to come (`reloads`). It may not, either, while
        unfinished requests of its adapter are of an earlier generation. Base has no record.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def _with_reload(self, adapter: Adapter, reload: LoRARequest) -> Adapter:
        """A copy of the record (`replace`) with one generation more, and in `reloads` the reload that begins it.

        The record itself stays as it is, and so does its dict of `reloads`. An interrupt may come between any two
        lines, and a generation without its reload would wait for ever.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def remove_lora(self, adapter_id: int) -> bool:
        """Unload: at once, or when the requests that use it have finished. False for an unknown id.

        From now on it is `leaving` (and `noted`), and new requests are refused.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def settle(self) -> None:
        """Do the reloads, by generation, and then the unload that no request stands in the way of, of all `_noted`.

        A reload waits for the unfinished requests of generations before its own. It is done once (`_reload`), and
        then leaves `reloads`. An unload waits for all unfinished requests of its adapter. Then the worker removes it
        from its slot and from memory (`remove_adapter`), and it is forgotten here (`_forget`). Should the worker fail,
        it is not: the next settling tries again.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def _reload(self, adapter: Adapter, generation: int) -> None:
        """Have the worker read it again (`add_adapter`); nobody who runs may lose a place to it (`_spare_who_runs`).

        What is not in memory (`manager.list_adapters`) is left to the next step that needs it, when there is room. Once
        it is read, versions before it are of no use any more (`_note_read`).

        After any error (`recoverable`) the worker still has the old weights. The error is kept in `failures` for the
        requests of this generation. The adapter's own is then at least the one after it, so that requests that come
        later do not end with this error. The record goes back to the version before the reload (`_go_back`), or it
        would name a folder that was never read.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def _in_flight(self, adapter: Adapter, before: int | None = None) -> bool:
        """Whether unfinished requests use the adapter, of a generation below `before` if that is given.

        They are counted in `queues.in_flight`, also those that wait or were preempted. It has adapter id ->
        generation -> count, and no entry where there are none.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    # endregion

    def _note_read(self, adapter: Adapter, generation: int) -> None:
        """Weights of this generation are in memory: nobody goes back to a version before them."""
        adapter.was_read = True
        if adapter.before:
            adapter.before = {g: version for g, version in adapter.before.items() if g > generation}

    def _go_back(self, adapter: Adapter, generation: int) -> bool:
        """The version that this generation began with cannot be read. False if none is known that came before it.

        The record takes the version before, with those of its names that no other adapter has taken meanwhile. Where
        another reload has been requested since, the record is of that one, and a failure of it leads further back.
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
        running = {request.adapter_id for request in self.queues.running if request.adapter_id}
        self.manager.set_in_use(running | self.pinned)

    def _forget(self, adapter: Adapter) -> None:
        """Drop all that was noted of it: under the same id and names there may soon be another adapter."""
        self.manager.tell("forget", adapter.id)
        for name in adapter.names:
            self.by_name.pop(name, None)
        self.noted.discard(adapter.id)
        self.pinned.discard(adapter.id)
        del self.adapters[adapter.id]

    # ---- pins wait for a slot, and for room in memory ------------------------------------------------------------

    def _has_memory_for(self, adapter: Adapter) -> bool:
        """Whether it is in memory, or could be with nothing dropped that is pinned or in use."""
        self._spare_who_runs()
        held = self.manager.list_adapters().keys()
        return adapter.id in held or len(held) < self.manager.capacity or not held <= self.manager.kept

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep the adapter in a slot: at once, or after the next step if running requests hold all slots.

        ValueError for an unknown id, RuntimeError when every slot is pinned already. After any error it is pinned only
        if it was before.
        """
        if adapter_id not in self.adapters:
            raise ValueError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        pins = self.pinned | {adapter_id}
        if len(pins) > self.manager.lora_slots:
            raise RuntimeRefusal(
                f"adapter {adapter_id} cannot be pinned: all {self.manager.lora_slots} slots are pinned "
                f"(adapters {sorted(pins - {adapter_id})}); unpin one or raise max_loras"
            )
        adapter, was_pinned = self.adapters[adapter_id], adapter_id in self.pinned
        self.pinned.add(adapter_id)
        try:
            if self._has_memory_for(adapter):
                self._pin(adapter)
        except BaseException:
            if not was_pinned:
                self._drop_pin(adapter_id)
            raise
        return True

    def _pin(self, adapter: Adapter) -> None:
        """Read it if need be, and pin it if there is a slot."""
        if adapter.id not in self.manager.list_adapters():
            self._read(adapter)
        if self.manager.has_room_for(adapter.id):
            self.worker.pin_adapter(adapter.id)
            self.manager.tell("pin", adapter.id, self.manager.list_active_adapters()[adapter.id])

    def _drop_pin(self, adapter_id: int) -> None:
        self.manager.unpin_adapter(adapter_id)
        self.pinned.discard(adapter_id)

    def _read(self, adapter: Adapter) -> None:
        """Have the version that is the next to be served in memory, and in a slot if there is one.

        If that fails and no request waits for it, what was not in memory is not, and the record goes back.
        """
        was_held = self.manager.get_adapter(adapter.id) is not None
        try:
            self.worker.add_adapter(self._next_to_serve(adapter))
        except BaseException as error:
            if is_recoverable(error) and not was_held and not self._in_flight(adapter):
                self.worker.remove_adapter(adapter.id)  # it may have been read, and not come into its slot
                self._go_back_from_unread(adapter)
            raise
        self._note_read(adapter, adapter.current_generation)

    def _next_to_serve(self, adapter: Adapter) -> LoRARequest:
        """What new requests get; while a reload waits for older requests, what the oldest of these was promised."""
        if not adapter.reloads:
            return adapter.request
        running = [request for request in self.queues.running if request.adapter_id == adapter.id]
        oldest = running[0] if running else self.queues.waiting.oldest(adapter.id)
        return adapter.request if oldest is None else oldest.lora_request

    def unpin_lora(self, adapter_id: int) -> bool:
        """Let the adapter be evicted again. False if it was not pinned."""
        was_pinned = adapter_id in self.pinned
        self._drop_pin(adapter_id)
        if was_pinned:
            self.manager.tell("unpin", adapter_id)
        return was_pinned

    def _pin_wanted(self) -> None:
        """Pin what waited for a slot. A pin whose adapter cannot be read any more is dropped, with a warning."""
        wanted = self.pinned - self.manager.pinned_adapters
        if wanted:
            self._spare_who_runs()
        for adapter in [self.adapters[adapter_id] for adapter_id in sorted(wanted)]:
            try:
                self._pin(adapter)
            except BaseException as error:
                recoverable(error)
                self._drop_pin(adapter.id)
                logger.warning("adapter '%s' could not be pinned: %s", adapter.request.lora_name, error)

    def prepare(self, lora_requests: Iterable[LoRARequest | None]) -> dict[int, BaseException]:
        """Pin what waits for a slot, then read what a step needs and is not in memory.

        Call it when the step is scheduled, since the scheduler made room then. Returns adapter id -> why it could not
        be read.
        """
        self._pin_wanted()
        requests = [request for request in lora_requests if request is not None]
        failures = self.worker.prepare_adapters(requests)
        for adapter_id in {request.lora_int_id for request in requests} - failures.keys():
            self._note_read(self.adapters[adapter_id], self.adapters[adapter_id].current_generation)
        return failures
