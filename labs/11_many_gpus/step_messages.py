"""A step as it travels to the other ranks. Stands for `SchedulerOutput` and `CachedRequestData` of
vllm/v1/core/sched/output.py (v0.22.1), which hold what is new since the step before.
"""

from labs.kit.overlay import Todo
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


class StepMessage(NamedTuple):
    """One step, a column for each thing that a rank must know of its P rows. Plain values: they are quick to pickle.

    request_ids   of the rows, in the order of the scheduler
    adapter_ids   0 = base
    starts        tokens that are computed already
    token_ids     what is computed now, of each row
    samples       whether the next token of the row is sampled
    held          how many blocks of each row count of those told with the last step; 0 = none
    new_blocks    those behind them
    whole         row -> its request, where its prompt is still to be scored (`wants_prompt_logprobs`), or its adapter
                  begins after `starts` (`adapter_start`)
    """

    request_ids: list[str]
    adapter_ids: list[int]
    starts: list[int]
    token_ids: list[list[int]]
    samples: list[bool]
    held: list[int]
    new_blocks: list[list[int]]
    whole: dict[int, Request]


class StepWriter:
    """Makes the messages, on the rank that schedules."""

    def __init__(self) -> None:
        # Of the last message's rows: request id -> its list of blocks, and how many of them were told
        self._told: dict[str, tuple[list[int], int]] = {}

    # region lab 11.4: broadcast of a step
    def write(self, output: SchedulerOutput) -> StepMessage:
        """What other ranks must know of a step that is about to be launched.

        Every message must reach every rank: the next one says only which blocks came since. Both sides remember the
        rows of the last message, and no others. The message's lists are its own: the scheduler's may grow before it is
        sent.
        """
        raise Todo("lab 11.4: broadcast of a step")

    # endregion


@dataclass
class Row:
    """What a model runner asks of a `Request`, on the ranks that do not schedule."""

    request_id: str
    adapter_id: int
    lora_request: LoRARequest | None
    num_computed_tokens: int
    block_ids: list[int]
    all_token_ids: "Tokens"
    wants_prompt_logprobs: bool = field(default=False, init=False)
    adapter_start: ClassVar[int] = 0  # it has begun
    sampling_params: ClassVar[SamplingParams] = SamplingParams()  # nothing is sampled there


class Tokens:
    """A list of tokens of which only those from `start` on are known."""

    def __init__(self, start: int, token_ids: list[int]) -> None:
        self.start, self.token_ids = start, token_ids

    def __getitem__(self, places: int | slice) -> Any:
        """Of known places, counted from the list's beginning."""
        if isinstance(places, slice):
            return self.token_ids[places.start - self.start : places.stop - self.start]
        return self.token_ids[places - self.start]


class StepReader:
    """Makes steps of the messages, on the other ranks."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}  # request id -> blocks

    # region lab 11.4: broadcast of a step
    def read(self, message: StepMessage) -> SchedulerOutput:
        """A step that a model runner can launch: `scheduled`, its rows as `running`, and how many tokens in all."""
        raise Todo("lab 11.4: broadcast of a step")

    def _extended(self, request_id: str, held: int, new: list[int]) -> list[int]:
        """The same list as in the step before, if the row still has those blocks."""
        raise Todo("lab 11.4: broadcast of a step")

    # endregion


@lru_cache(1024)
def seated(adapter_id: int) -> LoRARequest | None:
    """An adapter that is in its slot already: nobody reads it by this request."""
    return LoRARequest(f"adapter {adapter_id}", adapter_id, "(in its slot)") if adapter_id else None
