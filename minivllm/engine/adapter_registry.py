"""Who owns which adapter id and name, and what is asked of adapters while requests run.

Stands for the adapter half of vllm/entrypoints/openai/models/serving.py (v0.22.1), which keeps names only.
"""

import os
from collections.abc import Callable
from dataclasses import replace

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter import Adapter, AdapterTraits, AdapterVersion
from minivllm.engine.adapter_pins import AdapterPins
from minivllm.errors import RuntimeRefusal, all_pinned, is_leaving
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.request import LoRARequest
from minivllm.lora.seams import traits_readers
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager


class AdapterRegistry(AdapterPins):
    """The records of all adapters that requests may name: the one class that changes them.

    with_tokenizers   whether requests are text, so that adapters' own tokenizers are of use
    loading           ids of the adapters that are read beside the steps, kept by whoever reads them
    """

    def __init__(
        self, scheduler: Scheduler, worker: LRUCacheWorkerLoRAManager, with_tokenizers: bool = False
    ) -> None:
        super().__init__(scheduler, worker)
        self.loading: set[int] = set()
        self._is_read: Callable[[Request], str | None] | None = None
        self._traits_readers = [reader(self.manager, with_tokenizers) for reader in traits_readers]

    def may_join(self, request: Request) -> str | None:
        """None, or why a waiting request may not be admitted, even if there is room: the scheduler asks."""
        return self.may_run(request) or (self._is_read and self._is_read(request))

    def wait_for_reads(self, is_read: Callable[[Request], str | None] | None) -> None:
        """Have requests wait until their adapter was read beside the steps.

        is_read   None, or why a request that may run otherwise has to wait; None instead: steps read adapters
        """
        self._is_read = is_read

    # ---- naming ---------------------------------------------------------------------------------------------

    def examine(self, lora_request: LoRARequest) -> AdapterTraits:
        """What there is to know of an adapter before a request of it is taken; nothing changes.

        ValueError: id, name or folder contradict what is registered, or the adapter does not fit. FileNotFoundError:
        it is not there.
        """
        try:
            adapter = self._identify(lora_request)
        except ValueError as error:
            self.manager.tell("refuse", lora_request.lora_int_id, reason=str(error))
            raise
        if adapter is None or lora_request.load_inplace:
            lora = self.worker.check_adapter(lora_request)
            traits = AdapterTraits(name=lora_request.lora_name)
            for reader in self._traits_readers if lora.beside else ():
                traits = reader.read(traits, lora, lora_request)
            return traits
        # Of the reload that is to come, if there is one, else of what is in memory.
        traits, lora = adapter.traits, None if adapter.reloads else self.manager.get_adapter(adapter.id)
        is_plain = traits.is_plain and not (lora and lora.beside)
        for reader in () if is_plain else self._traits_readers:
            traits = reader.now(traits, lora, adapter.request)
        return traits

    def _identify(self, lora_request: LoRARequest) -> Adapter | None:
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
        if not lora_request.load_inplace and self._is_elsewhere(lora_request, adapter):
            path = lora_request.lora_path
            now = f", which leads to '{real_folder(path)}' by now" if path == adapter.path else ""
            raise ValueError(
                f"lora_int_id {adapter_id} belongs to adapter '{adapter.request.lora_name}' at "
                f"'{adapter.request.lora_path}' ({adapter.owner}), not to '{path}'{now}; "
                "give every adapter its own id, remove that one first, or pass load_inplace=True to replace it"
            )
        return adapter

    def _is_elsewhere(self, lora_request: LoRARequest, adapter: Adapter) -> bool:
        """Whether the request's path leads to another folder than the one that steps read.

        The text decides of a path that leads nowhere: a hub id, or a folder that is gone while the adapter is in
        memory.
        """
        path = lora_request.lora_path
        if path == adapter.request.lora_path:
            return False
        found = inode_of(path)
        return path != adapter.path if found is None else found != inode_of(adapter.request.lora_path)

    def check_slots(self, lora_request: LoRARequest) -> None:
        """AllPinned if every slot is pinned for another adapter."""
        others = self.pinned - {lora_request.lora_int_id}
        if len(others) >= self.manager.lora_slots:
            raise all_pinned(lora_request.lora_name, len(others))

    def register(
        self, lora_request: LoRARequest, owner: str, traits: AdapterTraits
    ) -> tuple[LoRARequest, int]:
        """The adapter a new request means, and its generation; the first mention registers it.

        traits   what `examine` found

        A second name for the same id and folder is an alias. A reload from another folder brings its own name: the
        names before it led to other weights, and are free.
        """
        name, adapter_id = lora_request.lora_name, lora_request.lora_int_id
        for reader in self._traits_readers if traits.added_tokens else ():
            traits = reader.keep(adapter_id, traits)
        adapter = self.adapters.get(adapter_id)
        before = adapter.names if adapter else ()
        if adapter is None:
            request = as_steps_load_it(lora_request)
            adapter = Adapter(AdapterVersion(request, lora_request.lora_path, traits), owner)
        elif lora_request.load_inplace:
            self.noted.add(adapter_id)
            adapter = self._with_order(adapter, lora_request, traits)
        if name not in adapter.names:
            adapter.version = adapter.version._replace(names=(*adapter.names, name))
        # All of a change at once: an interrupt may come between any two lines.
        self.adapters[adapter_id] = adapter
        for old in set(before).difference(adapter.names):
            self.by_name.pop(old, None)
        self.by_name[name] = adapter_id
        return adapter.request, adapter.generation

    def _with_order(self, adapter: Adapter, order: LoRARequest, traits: AdapterTraits) -> Adapter:
        """A copy of the record with one more reload to come, and what new requests find of it."""
        request, names = as_steps_load_it(order), adapter.names
        at_once = replace(order, lora_path=request.lora_path)  # it may be read in a step, long after
        if order.lora_name in names or not self._is_elsewhere(order, adapter):
            request = replace(request, lora_name=adapter.request.lora_name)
        else:
            names = ()
        version = AdapterVersion(request, order.lora_path, traits, names)
        ordered = self._with_reload(adapter, at_once)
        return replace(
            ordered, version=version, before={**adapter.before, ordered.generation: adapter.version}
        )

    def named(self, name: str) -> LoRARequest | None:
        """The adapter of that name, under that name; None if none has it."""
        if name not in self.by_name:
            return None
        request = self.adapters[self.by_name[name]].request
        # The one it was loaded under may be another adapter's by now.
        return request if request.lora_name == name else replace(request, lora_name=name)

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

    def _go_back(self, adapter: Adapter, generation: int) -> bool:
        for reader in self._traits_readers:
            reader.forget(adapter.id)
        return super()._go_back(adapter, generation)

    def _forget(self, adapter: Adapter) -> None:
        for reader in self._traits_readers if adapter.traits.added_tokens else ():
            reader.forget(adapter.id)
        super()._forget(adapter)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load ahead of the first request; errors as in `examine`. True: it is in memory.

        With `load_inplace` it is read again: at once, or when the requests that use it have finished. In the latter
        case the answer is False. RuntimeError when all that memory holds is pinned or in use. After an error the
        adapter is known as before.
        """
        known = self.adapters.get(lora_request.lora_int_id)
        before = known and known.version
        request, generation = self.register(lora_request, "add_lora", self.examine(lora_request))
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


def as_steps_load_it(lora_request: LoRARequest) -> LoRARequest:
    """The request as steps load it: with no order to reload, and with the real folder that its path leads to now.

    A step may load it long after. Then it neither waits for a network nor reads another version, because a link or a
    hub's branch leads there by now.
    """
    here = with_real_folder(lora_request)
    if real_folder(here.lora_path) is None:
        here = with_real_folder(replace(here, lora_path=get_adapter_absolute_path(here.lora_path)))
    return replace(here, load_inplace=False) if here.load_inplace else here


def with_real_folder(lora_request: LoRARequest) -> LoRARequest:
    """The request with the real folder that its path leads to; as it is where there is none on this machine."""
    folder = real_folder(lora_request.lora_path)
    is_real = folder in (None, lora_request.lora_path)
    return lora_request if is_real else replace(lora_request, lora_path=folder)


def inode_of(path: str) -> tuple[int, int] | None:
    """What tells a folder from all others on this machine, however it is spelled. None if there is nothing.

    One call of the system, where `real_folder` takes one for each part of the path: each request is compared.
    """
    try:
        found = os.stat(os.path.expanduser(path))
    except (OSError, ValueError):  # ValueError: a text that no path can be
        return None
    return found.st_dev, found.st_ino


def real_folder(path: str) -> str | None:
    """The absolute path, free of links, of what a path leads to now. None if there is nothing."""
    path = os.path.expanduser(path)
    return os.path.realpath(path) if os.path.exists(path) else None
