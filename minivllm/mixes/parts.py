"""Which adapters a mix is made of when a request for it arrives, and whether these are others than last time."""

from collections import Counter
from dataclasses import replace

from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.lora.events import LoRAEvent
from minivllm.lora.request import LoRARequest
from minivllm.mixes.request import MixRequest, Part


class MixParts:
    """`look_up_parts` of `AdapterRegistry`: finds a mix's parts, and orders a reload of a mix whose parts have changed.

    So a mix follows its parts as one adapter follows its folder: requests under way finish on the weights that they
    had, those that arrive after the order to load a part again wait for these, and then get the new ones.

    lives   adapter id -> how often it has been forgotten: another adapter may have come with the same id
    mixes   ids of the mixes that may be registered
    """

    def __init__(self) -> None:
        self.lives: Counter[int] = Counter()
        self.mixes: set[int] = set()

    def heard(self, event: LoRAEvent) -> None:
        """A listener of adapters' events."""
        if event.kind == "forget" and event.adapter_id in self.lives:
            self.lives[event.adapter_id] += 1

    def __call__(self, lora_request: MixRequest, registry: AdapterRegistry) -> MixRequest:
        """The request with its parts as they are read now.

        ValueError for a name that the engine does not know, and for a part that contradicts what is registered or is
        being unloaded.
        """
        found = [self._part(part, registry) for part, _ in lora_request.parts]
        composed, versions = tuple(request for request, _ in found), tuple(version for _, version in found)
        known = registry.adapters.get(lora_request.lora_int_id)
        if known is None:
            self._forget_unused(registry)
            self.mixes.add(lora_request.lora_int_id)
            is_stale = False
        else:
            before = known.request if isinstance(known.request, MixRequest) else lora_request
            is_stale = (before.composed, before.versions) != (composed, versions)
        is_ordered = lora_request.load_inplace or is_stale
        return replace(lora_request, composed=composed, versions=versions, load_inplace=is_ordered)

    def _part(self, part: Part, registry: AdapterRegistry) -> tuple[LoRARequest, tuple[int, int]]:
        """A part as it is read now, and its version."""
        if isinstance(part, str):
            if (named := registry.named(part)) is None:
                known = ", ".join(sorted(registry.by_name)[:8]) or "none"
                raise ValueError(f"adapter '{part}' of a mix is unknown (known: {known}); load it first")
            part = named
        part = registry.newest(part)
        adapter = registry.identify(part)
        if isinstance(adapter and adapter.request, MixRequest):
            raise ValueError(
                f"'{part.lora_name}' is a mix itself; give its adapters, with weights multiplied"
            )
        life = self.lives.setdefault(part.lora_int_id, 0)
        if adapter is None:
            # An order to load it again may be its first mention, and begins no generation then.
            return registry.worker.source.resolve(part), (life, -1)
        return adapter.request, (life, adapter.generation)

    def _forget_unused(self, registry: AdapterRegistry) -> None:
        """Have the registry forget mixes that memory has dropped: weights may be any numbers, so there is no end of
        mixes."""
        for adapter_id in self.mixes - registry.pinned:
            registry.release_unused(adapter_id)
        self.mixes &= registry.adapters.keys()
