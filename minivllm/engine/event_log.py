"""What happens to adapters and requests, in the log of "minivllm". vLLM (v0.22.1) logs counters, not events."""

import logging
from collections.abc import Callable

from minivllm.core.output import SchedulerOutput
from minivllm.core.scheduler import Scheduler
from minivllm.engine.recorder import skips
from minivllm.lora.events import LoRAEvent
from minivllm.lora.model_manager import LRUCacheLoRAModelManager

logger = logging.getLogger(__name__)

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

    def __init__(self, manager: LRUCacheLoRAModelManager, name_of: Callable[[int], str]) -> None:
        self.manager = manager
        self.name_of = name_of

    def __call__(self, event: LoRAEvent) -> None:
        kind, adapter_id = event.kind, event.adapter_id
        if kind == "load" and self.manager.get_adapter(adapter_id) is not None:
            kind = "reload"
        level, sentence = SENTENCES.get(kind, (logging.NOTSET, ""))
        if sentence and logger.isEnabledFor(level):
            said = sentence.format(slot=event.slot, seconds=event.seconds, reason=event.reason)
            logger.log(level, "adapter '%s' (id %d) %s", self.name_of(adapter_id), adapter_id, said)


def log_step(output: SchedulerOutput, scheduler: Scheduler, name_of: Callable[[int], str]) -> None:
    """DEBUG: whom a step preempted and whom it passed over, with the reason; call it after `schedule`."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for request_id in output.preempted:
        adapter_id = scheduler.requests[request_id].adapter_id
        made_way = adapter_id in output.preempted_adapters
        reason = "its slot is needed" if made_way else "no KV blocks are left"
        _log_request(request_id, adapter_id, name_of, f"was preempted: {reason}")
    for skip in skips(scheduler, output)[0]:
        _log_request(skip.request_id, skip.adapter_id, name_of, f"is passed over: {skip.reason}")


def _log_request(request_id: str, adapter_id: int, name_of: Callable[[int], str], said: str) -> None:
    name = f"adapter '{name_of(adapter_id)}' (id {adapter_id})" if adapter_id else "the base model"
    logger.debug("request '%s' of %s %s", request_id, name, said)
