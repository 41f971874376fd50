"""What happens to adapters, for whoever listens. Nothing in vllm/lora/ (v0.22.1) tells it."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoRAEvent:
    """Something that happened to an adapter.

    kind      one of those below
    slot      of "activate", "evict" and "pin"
    seconds   that a "load" or an "activate" took
    reason    of "refuse", in a sentence
    name      of "load": what its request calls the adapter

    Kinds:
    load      it was read from disk
    activate  it was copied into a slot
    hit       a step found it in a slot
    miss      a step had to have it copied into one
    evict     it left a slot, for another adapter
    drop      it left memory, for another adapter
    remove    it left memory, by order
    pin       it keeps its slot
    unpin     it may be evicted again
    refuse    it cannot be served
    forget    its id and names are free
    """

    kind: str
    adapter_id: int
    slot: int | None = None
    seconds: float = field(default=0.0, compare=False)
    reason: str = field(default="", compare=False)
    name: str = field(default="", compare=False)


Listener = Callable[[LoRAEvent], None]
