"""What happens to adapters, for whoever listens. Nothing in vllm/lora/ (v0.22.1) tells it."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoRAEvent:
    """Something that happened to an adapter.

    kind      "load" (read from disk), "activate" (into a slot), "hit" or "miss" (a step found it in a slot, or had
              it copied there), "evict" (out of a slot, for another one), "drop" (out of memory, for another one),
              "remove" (out of memory, by order), "pin", "unpin", "refuse" (it cannot be served), "forget" (its id
              and names are free)
    slot      of "activate", "evict" and "pin"
    seconds   that a "load" or an "activate" took
    reason    of "refuse", in a sentence
    name      of "load": what its request calls the adapter
    """

    kind: str
    adapter_id: int
    slot: int | None = None
    seconds: float = field(default=0.0, compare=False)
    reason: str = field(default="", compare=False)
    name: str = field(default="", compare=False)


Listener = Callable[[LoRAEvent], None]
