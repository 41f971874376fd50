"""What happens to adapters, in the log. Nothing in vllm/lora/ (v0.22.1) logs it."""

import logging
from collections.abc import Callable

from minivllm.lora.events import LoRAEvent
from minivllm.lora.lora_model import LoRAModel

# Under the name of the module whose events they are: `getLogger("minivllm.lora")` is the logger of all of them.
logger = logging.getLogger("minivllm.lora.events")

# Kind of an event -> level, and what is said of the adapter.
SENTENCES = {
    "load": (logging.INFO, "was read in {seconds:.3f} s"),
    "reload": (logging.INFO, "was read again in {seconds:.3f} s"),
    "remove": (logging.INFO, "was unloaded"),
    "pin": (logging.INFO, "is pinned in slot {slot}"),
    "unpin": (logging.INFO, "is pinned no longer"),
    "refuse": (logging.INFO, "is refused: {reason}"),
    "activate": (logging.DEBUG, "came into slot {slot} in {seconds:.3f} s"),
    "evict": (logging.DEBUG, "lost slot {slot} to another adapter"),
    "drop": (logging.DEBUG, "left memory for another adapter"),
}


class EventLog:
    """Writes a manager's events into the log: INFO for what somebody asked for, DEBUG for what follows from it."""

    def __init__(self, get_adapter: Callable[[int], LoRAModel | None]) -> None:
        self.get_adapter = get_adapter
        self.names: dict[int, str] = {}  # by id, of those that were read

    def __call__(self, event: LoRAEvent) -> None:
        kind, adapter_id = event.kind, event.adapter_id
        if kind == "load":
            self.names[adapter_id] = event.name
            kind = "load" if self.get_adapter(adapter_id) is None else "reload"
        name = self.names.pop(adapter_id, "") if kind == "forget" else self.names.get(adapter_id, "")
        level, sentence = SENTENCES.get(kind, (logging.NOTSET, ""))
        if sentence and logger.isEnabledFor(level):
            said = sentence.format(slot=event.slot, seconds=event.seconds, reason=event.reason)
            logger.log(level, "adapter '%s' (id %d) %s", name or adapter_id, adapter_id, said)
