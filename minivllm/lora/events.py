"""What happens to adapters, for whoever listens. Nothing in vllm/lora/ (v0.22.1) tells it."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoRAEvent:
    """Something that happened to an adapter.

    kind      "load" (read from disk), "activate" (into a slot), "hit" or "miss" (a step found it in a slot, or had
              it copied there), "evict" (out of a slot, for another one), "drop" (out of memory, for another one).
              What somebody removes by name is neither evicted nor dropped
    slot      of "activate" and "evict"
    seconds   that a "load" or an "activate" took
    """

    kind: str
    adapter_id: int
    slot: int | None = None
    seconds: float = field(default=0.0, compare=False)


Listener = Callable[[LoRAEvent], None]
