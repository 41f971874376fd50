"""Who owns which adapter id, and what waits for its requests to finish.

Stands for the adapter half of vllm/entrypoints/openai/models/serving.py (v0.22.1), which keeps names only.
"""

from minivllm.labs import Todo
import logging
from collections.abc import Iterable
from dataclasses import replace

from minivllm.core.output import RELOAD_PENDING
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_entry import AdapterEntry, at_hand, folder_of, registered
from minivllm.engine.adapter_tokenizers import AdapterTokenizers
from minivllm.engine.adapter_traits import AdapterTraits, numbers_of, traits_of
from minivllm.faults import as_fault
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """Adapters by id, and their loads, reloads, unloads and pins while requests run.

    A reload, an unload or a pin may have to wait for running requests: it is noted. `settle` does reloads and
    unloads, and `pin_wanted` pins, once no request stands in their way.

    entries      by id
    by_name      the same, by each of their names
    leaving      ids of those that are being unloaded: requests in flight finish, new ones are refused

    with_tokenizers   whether requests are text, so that adapters' own tokenizers are of use
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, with_tokenizers: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizers = AdapterTokenizers(self.manager) if with_tokenizers else None
        self.entries: dict[int, AdapterEntry] = {}
        self.by_name: dict[str, AdapterEntry] = {}
        self.leaving: set[int] = set()
        self._reloads: dict[tuple[int, int], LoRARequest] = {}
        self._failures: dict[tuple[int, int], BaseException] = {}
        self._wanted_pins: set[int] = set()
        self._pins_before: set[int] = set()  # before slots were last written to

    @property
    def manager(self) -> LRUCacheLoRAModelManager:
        return self.runner.lora_manager.manager

    # ---- naming ---------------------------------------------------------------------------------------------

    def examine(self, lora_request: LoRARequest) -> AdapterTraits:
        """What there is to know of an adapter before a request of it is taken; nothing changes.

        ValueError: id, name or folder contradict what is registered, or the adapter does not fit. FileNotFoundError:
        it is not there.
        """
        entry = registered(lora_request, self.entries, self.by_name, self.leaving)
        if entry is not None and not lora_request.load_inplace:
            return self._present_traits(entry)
        lora = self.runner.lora_manager.check_adapter(lora_request)
        return traits_of(lora, lora_request, self.tokenizers is not None)

    def _present_traits(self, entry: AdapterEntry) -> AdapterTraits:
        """An adapter's traits now: of the reload that is to come, if there is one, else of what is in memory."""
        adapter_id, traits = entry.request.lora_int_id, entry.traits
        lora = self.manager.get_adapter(adapter_id)
        if lora is not None and (adapter_id, entry.generation) not in self._reloads:
            scaling_factor, added_tokens = numbers_of(lora)
            traits = traits._replace(scaling_factor=scaling_factor, added_tokens=added_tokens)
        if self.tokenizers is None or not traits.added_tokens:
            return traits
        return traits._replace(tokenizer=self.tokenizers.get(entry.request))

    def resolve(
        self, lora_request: LoRARequest, owner: str, traits: AdapterTraits
    ) -> tuple[LoRARequest, int]:
        """The adapter a new request means, and its generation; the first mention registers it.

        traits   what `examine` found

        A second name for the same id and folder is an alias.
        """
        entry = self.entries.get(lora_request.lora_int_id)
        plain = replace(lora_request, load_inplace=False)
        if self.tokenizers is not None and traits.added_tokens:
            self.tokenizers.keep(lora_request.lora_int_id, traits.tokenizer)
            traits = traits._replace(tokenizer=None)
        if entry is None:
            entry = AdapterEntry(at_hand(plain), owner, folder_of(plain), traits)
            self.entries[lora_request.lora_int_id] = entry
        elif lora_request.load_inplace:
            request = replace(at_hand(plain), lora_name=entry.request.lora_name)
            entry = replace(entry, request=request, folder=folder_of(plain))
            self._note_reload(entry, lora_request, traits)
            # Folder, traits and generation at once: an interrupt may come between any two lines.
            self.entries[lora_request.lora_int_id] = entry
            self.by_name |= dict.fromkeys(entry.names, entry)
        if lora_request.lora_name not in entry.names:
            entry.names += (lora_request.lora_name,)
        self.by_name[lora_request.lora_name] = entry
        return entry.request, entry.generation

    def request_ended(self, adapter_id: int) -> None:
        """Do what waited for a request's end; forget an adapter that was named but never read."""
        if adapter_id not in self.manager.stats.by_adapter:
            self.release_unused(adapter_id)
        self.settle()

    def release_unused(self, adapter_id: int) -> None:
        """Forget an adapter that is not in memory and that no request uses: its id and names are free again."""
        loaded = adapter_id in self.manager.list_adapters()
        if not loaded and not self._in_flight(adapter_id):
            self._forget(adapter_id)

    def _forget(self, adapter_id: int) -> None:
        """Drop all that was noted of it: under the same id there may soon be another adapter."""
        entry = self.entries.pop(adapter_id, None)
        for name in entry.names if entry else ():
            self.by_name.pop(name, None)
        self.leaving.discard(adapter_id)
        if self.tokenizers is not None:
            self.tokenizers.forget(adapter_id)
        self._drop_pin(adapter_id)
        self._failures = {key: error for key, error in self._failures.items() if key[0] != adapter_id}
        self.manager.stats.by_adapter.pop(adapter_id, None)

    def reset(self) -> None:
        """After a call that broke off: make the books agree with what is in memory and with the reloads to come.

        An order of a reload whose generation its adapter does not know was not given to its end. A pin that a reload
        lost is wanted again. What no request stands in the way of is done.
        """
        self.by_name = {name: entry for entry in self.entries.values() for name in entry.names}
        self.leaving &= self.entries.keys()
        for adapter_id in self.manager.list_active_adapters().keys() - self.manager.list_adapters().keys():
            self.manager.deactivate_adapter(adapter_id)
        self._wanted_pins |= self._pins_before - self.manager.pinned_adapters
        for adapter_id, generation in list(self._reloads):
            if adapter_id not in self.entries or generation > self.entries[adapter_id].generation:
                del self._reloads[adapter_id, generation]
        self.scheduler.blocked_adapters = dict.fromkeys(self._reloads, RELOAD_PENDING)
        for adapter_id in self.entries.keys() ^ self.manager.stats.by_adapter.keys():
            self.release_unused(adapter_id)
        self.settle()

    def name_of(self, adapter_id: int) -> str:
        entry = self.entries.get(adapter_id)
        return entry.request.lora_name if entry else str(adapter_id)

    # ---- load, reload, unload, pin --------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load ahead of the first request. True if it was not in memory before; errors as in `examine`.

        With `load_inplace` it is read again: at once, or when the requests that use it have finished.
        RuntimeError when all that memory holds is pinned or in use.
        """
        request, generation = self.resolve(lora_request, "add_lora", self.examine(lora_request))
        try:
            self.settle()
            if error := self._failures.pop((request.lora_int_id, generation), None):
                raise error
            if (request.lora_int_id, generation) in self._reloads:
                return False
            self._refuse_if_memory_is_full(request)
            return self.runner.add_lora(request)
        finally:
            if request.lora_int_id not in self.manager.stats.by_adapter:
                self.release_unused(request.lora_int_id)

    def _refuse_if_memory_is_full(self, lora_request: LoRARequest) -> None:
        if not self._has_memory_for(lora_request.lora_int_id):
            raise RuntimeError(
                f"adapter '{lora_request.lora_name}' cannot be loaded: the {self.manager.capacity} adapters in "
                "memory are all pinned or in use; unpin one, wait, or raise max_cpu_loras"
            )

    def _has_memory_for(self, adapter_id: int) -> bool:
        """Whether it is in memory, or could be with nothing evicted that is pinned or in use."""
        self._refresh_in_use()
        held = self.manager.list_adapters().keys()
        kept = self.manager.in_use | self.manager.pinned_adapters
        return adapter_id in held or len(held) < self.manager.capacity or not held <= kept

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep the adapter in a slot: at once, or after the next step if running requests hold all slots.

        ValueError for an unknown id, RuntimeError when every slot is pinned already.
        """
        if adapter_id not in self.entries:
            raise ValueError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        pins = self.pinned_adapters() | {adapter_id}
        if len(pins) > self.manager.lora_slots:
            raise RuntimeError(
                f"adapter {adapter_id} cannot be pinned: all {self.manager.lora_slots} slots are pinned "
                f"(adapters {sorted(pins - {adapter_id})}); unpin one or raise max_loras"
            )
        if self._has_memory_for(adapter_id):
            self._pin(adapter_id)
        else:
            self._wanted_pins.add(adapter_id)
        return True

    def _pin(self, adapter_id: int) -> None:
        """Read it if need be, and pin it if there is a slot; if there is none, it is wanted."""
        if adapter_id not in self.manager.list_adapters():
            self.runner.add_lora(self.entries[adapter_id].request)
        if self.manager.has_room_for(adapter_id):
            self.runner.pin_lora(adapter_id)
            self._wanted_pins.discard(adapter_id)
        else:
            self._wanted_pins.add(adapter_id)

    def unpin_lora(self, adapter_id: int) -> bool:
        """Let the adapter be evicted again. False if it was not pinned."""
        wanted = adapter_id in self._wanted_pins
        self._drop_pin(adapter_id)
        return self.manager.unpin_adapter(adapter_id) or wanted

    def _drop_pin(self, adapter_id: int) -> None:
        self._wanted_pins.discard(adapter_id)
        self._pins_before.discard(adapter_id)

    def pinned_adapters(self) -> set[int]:
        """Adapters whose slots the scheduler must not count on."""
        return self.manager.pinned_adapters | self._wanted_pins

    def pin_wanted(self) -> None:
        """Pin what waited for a slot; call it when a step is scheduled, since the scheduler made room then.

        A pin whose adapter cannot be read any more is dropped, with a warning in the log.
        """
        if self._wanted_pins:
            self._refresh_in_use()
        for adapter_id in sorted(self._wanted_pins):
            try:
                self._pin(adapter_id)
            except BaseException as error:
                as_fault(error)
                self._wanted_pins.discard(adapter_id)
                logger.warning("adapter '%s' could not be pinned: %s", self.name_of(adapter_id), error)

    # ---- what waits for requests ----------------------------------------------------------------------------

    # region lab 7.5: changes that wait for requests in flight
    def _note_reload(self, entry: AdapterEntry, lora_request: LoRARequest, traits: AdapterTraits) -> None:
        """Order a reload: the next generation of the adapter, whose requests are held back until it is done.

        The order is kept under (adapter id, generation) in `_reloads`, with its `load_inplace`. Under the same
        key the scheduler is told to admit none of that generation (`blocked_adapters`, RELOAD_PENDING). The
        entry has the new generation, traits and `folder_of` at once; its `request` stays without the flag.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def remove_lora(self, adapter_id: int) -> bool:
        """Unload: at once, or when the requests that use it have finished. False for an unknown id.

        From now on it is among those `leaving`, and new requests are refused.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def settle(self) -> None:
        """Do the reloads, by generation, and then the unloads that no request stands in the way of any more.

        A reload waits for the unfinished requests of generations before its own. It is done once (`_reload`),
        and its order and its block are gone. An unload waits for all unfinished requests of its adapter; then
        the runner removes it from its slot and from memory, and it is forgotten here (`_forget`).
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def _reload(self, lora_request: LoRARequest, generation: int) -> None:
        """Have the runner read it again (`add_lora`); nobody who runs may lose a place to it (`_refresh_in_use`).

        What is not in memory (`manager.list_adapters`) is left to the next step that needs it, when there is room.

        After any error (`as_fault`) the runner still has the old weights. The error is kept in
        `_failures` under (adapter id, generation) for the requests that waited; the entry's generation is a later
        one from then on, so that whoever comes next does not share their fate.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    def _in_flight(self, adapter_id: int, before: int | None = None) -> bool:
        """Whether unfinished requests use the adapter, of a generation below `before` if that is given.

        The scheduler counts them in `in_flight`, also those that wait or were preempted: `generations` of an
        adapter are those of which there are any.
        """
        raise Todo("lab 7.5: changes that wait for requests in flight")

    # endregion

    def failures(self) -> dict[tuple[int, int], BaseException]:
        """(adapter id, generation) -> error of the reloads that have failed, but for those that were `answered_for`."""
        return dict(self._failures)

    def answered_for(self, failure: tuple[int, int]) -> None:
        """Everybody who waited for that reload has ended. Not before: who is left would get the old weights."""
        self._failures.pop(failure, None)

    def _refresh_in_use(self) -> None:
        """Between steps requests come and go; what runs now, or waits to be pinned, must not be evicted."""
        self.manager.in_use = frozenset(_adapter_ids(self.scheduler)) | self._wanted_pins
        self._pins_before = set(self.manager.pinned_adapters)


def _adapter_ids(scheduler: Scheduler) -> Iterable[int]:
    return (request.adapter_id for request in scheduler.running if request.adapter_id)
