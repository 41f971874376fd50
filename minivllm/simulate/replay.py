"""Replays a record: a simulated engine gets the times of its calls, and shows what the engine did during steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.core.request import Request
from minivllm.simulate.cost_model import CostModel, Held, StepWork, work_of
from minivllm.simulate.records import Call, arrivals_of, calls_of, put_in_place, replica_config, sizes_of
from minivllm.simulate.replica import Replica

ROUNDED_S = 1e-4  # so far an arrival and a call's start may be off
NEVER = 1e9  # seconds: no read finishes before the record says so


@dataclass(frozen=True)
class Replayed:
    """A call of the record, and the same call of the simulated engine.

    work      what it launched; None if it launched nothing
    held      what delayed that launch; without a launch, what the host checked
    reading   adapters that were being read when it launched, those that it began to read among them
    """

    call: Call
    work: StepWork | None
    held: Held
    reading: frozenset[int]


def replay(result: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[list[Replayed], Replica]:
    """Every call, and the engine after it. A read has finished when a call runs an adapter that could not run before.

    The number of requests in the record shows whether a request came just before a call or just after it.
    """
    ahead = any(call.ahead for call in calls_of(row))
    cost = CostModel(graph_tokens=int(ahead), concurrent_copies=ahead, unpack_s=NEVER)
    replica = Replica(0, replica_config(result, row), cost, sizes_of(row, 1.0))
    put_in_place(replica, row)
    scheduler, reader = replica.scheduler, replica.reader
    coming, found = deque(arrivals_of(row)), []
    for call, (ran, present) in zip(calls_of(row), what_calls_had(row)):
        ending = sum(map(ends_next, scheduler.running))
        wanted = present - len(scheduler.running) - len(scheduler.waiting) + ending
        while coming and coming[0].time_s <= call.started_s + (ROUNDED_S if wanted > 0 else -ROUNDED_S):
            replica.add(coming.popleft())
            wanted -= 1
        for adapter_id in ran & reader.reads.keys():
            reader.reads[adapter_id] = call.started_s
        begun = replica.begin_step(call.started_s) is not None
        work = work_of(replica.output, replica.ranks) if begun and replica.output.scheduled else None
        found.append(Replayed(call, work, replica.held_by(work), frozenset(reader.reads)))
        if begun:
            replica.end_step(call.ended_s)
    return found, replica


def ends_next(request: Request) -> bool:
    """Whether its next token is its last."""
    is_decoding = request.num_computed_tokens >= request.num_prompt_tokens
    return is_decoding and len(request.output_token_ids) + 1 == request.sampling_params.max_tokens


def what_calls_had(row: Mapping[str, Any]) -> Iterator[tuple[set[int], int]]:
    """Of each call: adapters that its step computed for, and requests that were there after it."""
    adapters, running, waiting = map(row["step_columns"].index, ("adapter_ids", "running", "waiting"))
    ran: set[int] = set()
    for line in row["steps"]:
        said = line.split()
        if said[adapters] != "=":
            ran = {int(each) for each in said[adapters].split(",") if each != "-"}
        yield ran, int(said[running]) + int(said[waiting])
