"""A runner's adapter managers as callers of an engine see them. Stands for nothing in vllm/v1/worker/ (v0.22.1).

A worker's managers there know nothing of what the server calls an adapter. So an adapter that was added below the
server answers the requests of another one that has the same id.
"""

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

from minivllm.errors import RuntimeRefusal
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.request import LoRARequest


class AdapterOwner(Protocol):
    """Decides which adapters there are, and which keep a slot: an engine, by its records. Errors as of `LLMEngine`."""

    def add_lora(self, lora_request: LoRARequest) -> bool: ...

    def remove_lora(self, lora_id: int) -> bool: ...

    def pin_lora(self, lora_id: int) -> bool: ...

    def unpin_lora(self, lora_id: int) -> bool: ...

    def has_lora(self, lora_id: int) -> bool:
        """Whether requests may name the adapter, in memory or not."""


class OwnedManager:
    """A manager whose adapters have an owner.

    It reads as the manager does, but calls that change adapters go to the owner. No attribute can be set on it. The
    owner itself, and a step, work with the manager behind it.
    """

    __slots__ = ("_manager", "_owner")

    def __init__(self, manager: Any, owner: AdapterOwner) -> None:
        self._manager, self._owner = manager, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def remove_adapter(self, adapter_id: int) -> bool:
        return self._owner.remove_lora(adapter_id)

    def remove_all_adapters(self) -> None:
        """Unload whatever is in memory."""
        for adapter_id in sorted(self._manager.list_adapters()):
            self._owner.remove_lora(adapter_id)

    def pin_adapter(self, lora_id: int) -> bool:
        return self._owner.pin_lora(lora_id)


class OwnedModelManager(OwnedManager):
    """A `LRUCacheLoRAModelManager` that has an owner. RuntimeError where weights alone do not say whose they are."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._manager)

    def add_adapter(self, adapter: LoRAModel) -> NoReturn:
        raise RuntimeRefusal(
            f"adapter {adapter.id} cannot be added to an engine's manager as weights without a name; call "
            "engine.add_lora with a LoRARequest, which may hold tensors (lora_tensors)"
        )

    def set_in_use(self, adapter_ids: Iterable[int]) -> NoReturn:
        raise RuntimeRefusal(
            "an engine says itself which adapters are in use; to keep one, call engine.pin_lora"
        )

    def replace_adapter(self, adapter: LoRAModel) -> NoReturn:
        raise RuntimeRefusal(
            f"adapter {adapter.id} cannot be replaced in an engine's manager, since requests in flight may use it; "
            "call engine.add_lora with a LoRARequest that has load_inplace=True"
        )

    def unpin_adapter(self, lora_id: int) -> bool:
        return self._owner.unpin_lora(lora_id)

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take an adapter out of its slot, until a step needs it. RuntimeError for one that is pinned there."""
        if adapter_id in self._manager.pinned_adapters:
            raise RuntimeRefusal(
                f"adapter {adapter_id} is pinned, so it keeps its slot; call engine.unpin_lora({adapter_id}) first"
            )
        return self._manager.deactivate_adapter(adapter_id)


class OwnedWorkerManager(OwnedManager):
    """A `LRUCacheWorkerLoRAManager` that has an owner."""

    __slots__ = ()

    @property
    def manager(self) -> OwnedModelManager:
        return OwnedModelManager(self._manager.manager, self._owner)

    _adapter_manager = manager  # vLLM's name

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        return self._owner.add_lora(lora_request)

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> NoReturn:
        raise RuntimeRefusal(
            f"adapter '{lora_request.lora_name}' of zeros cannot be added to an engine's manager; start the engine "
            "with warm_up=True, which runs steps with such adapters"
        )

    def set_active_adapters(
        self, requests: Iterable[LoRARequest | None], mapping: LoRAMapping | None
    ) -> None:
        """As of the manager, for adapters that the owner has."""
        self._manager.set_active_adapters(self._known(requests), mapping)

    def prepare_adapters(self, requests: Iterable[LoRARequest | None]) -> dict[int, BaseException]:
        """As of the manager, for adapters that the owner has."""
        return self._manager.prepare_adapters(self._known(requests))

    def _known(self, requests: Iterable[LoRARequest | None]) -> list[LoRARequest | None]:
        """The requests. RuntimeError for an adapter that the owner does not have."""
        requests = list(requests)
        for request in filter(None, requests):
            if not self._owner.has_lora(request.lora_int_id):
                raise RuntimeRefusal(
                    f"adapter '{request.lora_name}' (id {request.lora_int_id}) is not registered; call "
                    "engine.add_lora before a step makes it active"
                )
        return requests
