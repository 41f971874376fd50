"""What the scheduler says of a step. Stands for vllm/v1/core/sched/output.py (v0.22.1)."""

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from minivllm.core.request import Request

# Why a request was passed over, and why the queue stopped.
MAX_LORAS = "max_loras"
RELOAD_PENDING = "reload pending"
ADAPTER_COPY = "adapter copy"
NO_BLOCKS = "KV blocks"


class ScheduledRequest(NamedTuple):
    """Compute tokens `num_computed_tokens .. + num_new_tokens` of a request.

    samples     these tokens reach the end of those known, so that the next one is sampled
    """

    request: Request
    num_new_tokens: int
    samples: bool


@dataclass
class SchedulerOutput:
    """One step. vLLM: `SchedulerOutput`.

    scheduled       in the order of the running queue
    running         all running requests, also those that get no tokens in this step
    cached_tokens   request id -> tokens found in the prefix cache, for those admitted in this step
    preempted       ids of requests that lost their KV blocks and wait again
    preempted_adapters  those whose requests made way for an adapter that was due, or for a pin
    passed_over     adapter -> why the first of its requests that this step asked could not join: MAX_LORAS,
                    RELOAD_PENDING, ADAPTER_COPY (see `prefetch`), or what `Scheduler.why_wait` says
    refused         requests that can never run (every slot is pinned for others): FINISHED_ERROR and gone.
                    The caller answers them; a second call of `schedule` does not name them again
    prefetch        adapters that get a slot while this step runs, for requests that join the next one
    halted_by       what kept the rest of the queue waiting: "max_num_seqs", "token budget", "KV blocks"
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    preempted_adapters: list[int] = field(default_factory=list)
    passed_over: dict[int, str] = field(default_factory=dict)
    refused: list[Request] = field(default_factory=list)
    prefetch: list[int] = field(default_factory=list)
    halted_by: str | None = None
    total_num_scheduled_tokens: int = 0

    @cached_property
    def only_decodes(self) -> bool:
        """Whether each request that is scheduled computes one token and samples the next. Of a step that is decided."""
        samples = all(map(attrgetter("samples"), self.scheduled))
        return samples and self.total_num_scheduled_tokens == len(self.scheduled)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {s.request.request_id: s.num_new_tokens for s in self.scheduled}
