"""The records of adapters that have versions.

vLLM (v0.22.1) has `load_inplace`, which overwrites the slot of requests that run.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.engine.adapter import Adapter, AdapterVersion
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.errors import RuntimeRefusal, is_leaving, require_int, require_one_of, shown
from minivllm.lora.request import AtLeast, LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.versions.weights import Awaited, refuse_other_prompts, request_of, restarted

# Why a request is passed over: the version that it asks for has not come.
VERSION_PENDING = "version pending"

# What becomes of requests under way.
RUNNING = ("finish", "restart")

# Ids of versions, and of what waits for one. People count from 1, and ids made of names begin at 2**61.
FIRST_ID = 2**60

# A step in which everybody waits for a version does nothing, and the next one follows at once.
SECONDS_IDLE = 0.002


class VersionedRegistry(AdapterRegistry):
    """Records of adapters whose weights may be replaced while requests run. Each version is a record of its own.

    The newest one has the names. Those before have none: no new request finds them, they are `leaving`, and are
    forgotten with their last request. A request that waits for a version has a record, too, until it goes on with that
    version. Also a reload (`load_inplace`), which waits for the requests before it, counts as a version.

    clock    seconds
    aliases  the id that an adapter was added by -> its newest version's
    """

    def __init__(
        self,
        queues: RequestQueues,
        worker: LRUCacheWorkerLoRAManager,
        find_by_name: Callable[[str, str, Collection[str]], LoRARequest] | None = None,
        look_up_parts: Callable[[LoRARequest, AdapterRegistry], LoRARequest] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tensor_parallel_size: int = 1,
    ) -> None:
        super().__init__(queues, worker, find_by_name, look_up_parts)
        self.clock, self._tensor_parallel_size = clock, tensor_parallel_size
        self._ids = itertools.count(FIRST_ID)
        self._first: dict[int, Adapter] = {}  # the record that an adapter was added by, by that id
        self._older: dict[int, list[Adapter]] = {}  # by the newest one's id, while requests use them
        self._until: dict[int, float] = {}  # by the id of what waits for a version
        # A version that was pinned -> the one that is to be, once it has gone.
        self._heirs: dict[int, int] = {}

    # ---- what requests mean -----------------------------------------------------------------------------------

    def newest(self, lora_request: LoRARequest) -> LoRARequest:
        """As the base class; the request that the adapter was added by means its newest version, as does one of that
        version's folder."""
        adapter_id, name = lora_request.lora_int_id, lora_request.lora_name
        if adapter_id not in self.aliases:
            return lora_request
        adapter = self.adapters[self.aliases[adapter_id]]
        if lora_request.load_inplace:
            return replace(lora_request, lora_int_id=adapter.id)
        same = (self._first[adapter_id], adapter)
        if name not in adapter.names or all(each.is_elsewhere(lora_request.lora_path) for each in same):
            raise ValueError(
                f"lora_int_id {adapter_id} belongs to adapter '{adapter.request.lora_name}', which is at version "
                f"{adapter.request.version}; name that one, or give '{name}' its own id"
            )
        return self.named(name)

    def find(self, name: str, base_model: str) -> LoRARequest:
        """As the base class; for a version that has not come, the request that waits for it."""
        found = super().find(str(name), base_model)
        if not isinstance(name, AtLeast) or found.version >= name.version:
            return found
        if found.lora_int_id not in self.adapters:
            raise ValueError(f"adapter '{name}' was not added yet, so that nobody updates it; add it first")
        path = f"version:{name.version}"
        return Awaited(
            *(str(name), next(self._ids), path), version=None, least=name.version, seconds=name.seconds
        )

    def _register_wait(
        self, lora_request: Awaited, owner: str, found: Mapping[str, Any]
    ) -> tuple[LoRARequest, int]:
        adapter_id = lora_request.lora_int_id
        # Leaving, so that it is forgotten with its request.
        self.adapters[adapter_id] = Adapter(
            AdapterVersion(lora_request, lora_request.lora_path, found), owner, leaving=True
        )
        self._until[adapter_id] = self.clock() + lora_request.seconds
        self.noted.add(adapter_id)
        return lora_request, 0

    def _with_reload_of(self, adapter: Adapter, reload: LoRARequest, found: Mapping[str, Any]) -> Adapter:
        later = super()._with_reload_of(adapter, reload, found)
        request = replace(later.request, version=adapter.request.version + 1)
        later.version = later.version._replace(request=request)
        return later

    # ---- an update --------------------------------------------------------------------------------------------

    # region lab 13.2: an update beside requests under way
    def update_lora(
        self,
        preempt: Callable[[int], None],
        adapter: str | int,
        weights: Any,
        peft_config: dict[str, Any] | None = None,
        version: int | None = None,
        running: str = "finish",
    ) -> int:
        """As `LLMEngine.update_lora`. What can be refused is, before anything changes: the new weights are in memory by
        then, and in a slot if one is free.

        preempt   `Scheduler.preempt`: has an adapter's running requests wait, with nothing computed of them

        Versions before the newest may have requests under way, too (`_older`). Each version goes with its last request.
        With "finish" all of them keep the version that they have; with "restart" they all go on with the new one, and
        none of them runs while it changes hands.
        """
        old = self._record(adapter)
        require_one_of(RUNNING, running=running)
        number = self._number(old, version)
        if self._tensor_parallel_size > 1:
            raise ValueError(
                f"update_lora is served by one process, but tensor_parallel_size is {self._tensor_parallel_size}; use "
                "load_inplace, which waits for the requests before"
            )
        new = self._read_version(old, request_of(old.request, next(self._ids), weights, peft_config, number))
        older = [old, *(each for each in self._older.pop(old.id, ()) if each.id in self.adapters)]
        self._older[new.id] = older
        self._take_place(old, new)
        if running == "restart":
            for each in older:
                preempt(each.id)
                for request in self._users(each.id):
                    self._restart(request, new)
        super().remove_lora(old.id)  # with its last request
        return number

    # endregion

    def _record(self, adapter: str | int) -> Adapter:
        """The newest version of an adapter, by its name or id. ValueError: unknown, or being unloaded."""
        adapter_id = self.by_name.get(adapter) if isinstance(adapter, str) else adapter
        record = self.adapters.get(self.aliases.get(adapter_id, adapter_id))
        if record is None or (record.leaving and not record.names):
            known = ", ".join(sorted(self.by_name)[:8]) or "none"
            raise ValueError(f"adapter {shown(adapter)} is unknown (known: {known}); add it first")
        if record.leaving:
            raise is_leaving(record.request.lora_name, record.id)
        return record

    def _number(self, old: Adapter, version: int | None) -> int:
        if version is None:
            return old.request.version + 1
        require_int(1, version=version)
        if version <= old.request.version:
            raise ValueError(
                f"version must be greater than that of adapter '{old.request.lora_name}', which is "
                f"{old.request.version}, got {version}"
            )
        return version

    def _read_version(self, old: Adapter, request: LoRARequest) -> Adapter:
        """A record whose weights have been read. On errors there is none, and nothing has changed."""
        path, request = request.lora_path, self.worker.source.resolve(request)
        found = self.worker.source.check(request).beside
        refuse_other_prompts(request.lora_name, old.found, found)
        new = Adapter(AdapterVersion(request, path, found), "update_lora")
        self.adapters[new.id] = new
        try:
            if not self._has_memory_for(new):
                raise RuntimeRefusal(
                    f"adapter '{request.lora_name}' cannot be updated: the {self.manager.capacity} adapters in memory "
                    "are all pinned or in use; unpin one, wait, or raise max_cpu_loras"
                )
            self._read(new)
        except BaseException:
            self._forget(new)
            raise
        return new

    def _take_place(self, old: Adapter, new: Adapter) -> None:
        """From now on names, and the id that the adapter was added by, lead to the new version, and so does the pin
        once the old one has gone: until then it may need the slot."""
        given = next((given for given, newest in self.aliases.items() if newest == old.id), old.id)
        self._first.setdefault(given, old)
        new.version, old.version = (
            new.version._replace(names=old.names),
            old.version._replace(names=()),
        )
        self.aliases[given] = new.id
        self.by_name |= dict.fromkeys(new.names, new.id)
        self._heirs = {pinned: new.id if heir == old.id else heir for pinned, heir in self._heirs.items()}
        if old.id in self.pinned:
            self._drop_pin(old.id)
            self._heirs[old.id] = new.id

    # ---- requests that wait, or go on ---------------------------------------------------------------------------

    def why_wait(self, request: Request) -> str | None:
        return VERSION_PENDING if request.adapter_id in self._until else super().why_wait(request)

    def settle(self) -> None:
        """As the base class. Then requests whose version has come go on with it, and those whose time is over fail."""
        super().settle()
        for adapter_id in list(self._until):
            self._settle_wait(self.adapters[adapter_id])
        in_flight = self.queues.in_flight
        if self._until and in_flight.keys() <= self._until.keys():
            time.sleep(SECONDS_IDLE)

    # region lab 13.1: a request that waits for a version
    def _settle_wait(self, wait: Adapter) -> None:
        """Between two steps: whoever waits under this record goes on, goes on waiting, or fails.

        wait   its `request` has the adapter's name (`lora_name`), the version that will do (`least`) and the seconds
               that were granted; `_until` has the time on `clock` from which on that is over. Its requests are
               `_users(wait.id)`

        Requests go on with the newest version if that will do (`queues.reassign`, with the generation of its record),
        and the record is forgotten (`_forget`). Weights of a reload that is still to come (`reloads`) have not come,
        whatever number the record has by then. Where the version is there and the time is over, too, they go on.

        What is kept in `wait.failures[0]` ends them with that error. One fails at once where nobody will bring the
        version: the adapter is gone or being unloaded (`is_leaving(name, wait.id)`). The other one is a RuntimeRefusal
        that says which version of which adapter did not come, within how many seconds, and at which one it is.
        An error that is there stays.
        """
        name, least = wait.request.lora_name, wait.request.least
        newest = self.adapters.get(self.by_name.get(name, 0))
        if newest is None or newest.leaving:
            wait.failures.setdefault(0, is_leaving(name, wait.id))
        elif not newest.reloads and newest.request.version >= least:
            for request in self._users(wait.id):
                self.queues.reassign(request, newest.request, newest.generation)
            self._forget(wait)
        elif self.clock() >= self._until[wait.id]:
            error = RuntimeRefusal(
                f"version {least} of adapter '{name}' did not come within {wait.request.seconds:g} s, it is at "
                f"{newest.request.version}; update it, or wait longer"
            )
            wait.failures.setdefault(0, error)

    # endregion

    def _users(self, adapter_id: int) -> list[Request]:
        if adapter_id not in self.queues.in_flight:
            return []
        return [request for request in self.queues.requests.values() if request.adapter_id == adapter_id]

    # region lab 13.2: an update beside requests under way
    def _restart(self, request: Request, new: Adapter) -> None:
        """A request of a version before, which waits and of which nothing is computed, goes on with the new one.

        Its place by arrival stays, and so do tokens that were sampled; `restarted` says whose they are. Logprobs of its
        prompt are those of the weights that its answer begins with: if it has not begun, there are none yet.
        """
        if not request.output_token_ids:
            request.prompt_logprobs = []  # what there is was computed with other weights
        own = restarted(request.lora_request, request.num_output_tokens, new.request)
        self.queues.reassign(request, own, new.generation)

    # endregion

    # ---- an adapter as a whole: all of its versions -------------------------------------------------------------

    def _in_flight(self, adapter: Adapter, before: int | None = None) -> bool:
        """As the base class; without `before` also of the versions before: it is unloaded after them."""
        if super()._in_flight(adapter, before):
            return True
        older = self._older.get(adapter.id, ()) if before is None else ()
        return any(each.id in self.queues.in_flight for each in older)

    def remove_lora(self, adapter_id: int) -> bool:
        return super().remove_lora(self.aliases.get(adapter_id, adapter_id))

    def pin_lora(self, adapter_id: int) -> bool:
        return super().pin_lora(self.aliases.get(adapter_id, adapter_id))

    def unpin_lora(self, adapter_id: int) -> bool:
        adapter_id = self.aliases.get(adapter_id, adapter_id)
        waiting = [pinned for pinned, heir in self._heirs.items() if heir == adapter_id]
        for pinned in waiting:
            del self._heirs[pinned]
        return super().unpin_lora(adapter_id) or bool(waiting)

    def _forget(self, adapter: Adapter) -> None:
        super()._forget(adapter)
        self._until.pop(adapter.id, None)
        self._older.pop(adapter.id, None)
        for given in [given for given, newest in self.aliases.items() if newest == adapter.id]:
            del self.aliases[given], self._first[given]
        heir = self._heirs.pop(adapter.id, None)
        if heir in self.adapters and len(self.pinned) < self.manager.lora_slots:
            self.pinned.add(heir)
