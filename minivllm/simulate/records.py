"""A record of traffic that an engine served, by `benchmarks.engine serve`: arrivals, adapters, and each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies.keeping import POLICIES as KEEPING
from minivllm.policies.scheduling import POLICIES as SCHEDULING
from minivllm.simulate.adapters import AdapterSize
from minivllm.simulate.cost_model import StepWork
from minivllm.simulate.fleet import adapters_of_ranks
from minivllm.simulate.replica import Replica, lora_request
from minivllm.simulate.replica_config import Elastic, ReplicaConfig
from minivllm.simulate.traffic import Arrival


class Call(NamedTuple):
    """One call of an engine's `step`. Times are seconds after the start.

    ended_s   when it returned
    concurrent   copies into slots while that step ran
    copies    copies into slots since the call before
    ahead     the tokens of the step that it launched were read by the next call
    work      of that step; None if none was launched
    """

    started_s: float
    ended_s: float
    concurrent: int
    copies: int
    ahead: bool
    work: StepWork | None


def arrivals_of(row: Mapping[str, Any]) -> list[Arrival]:
    """The arrivals of a record."""
    found = []
    for line in row["arrivals"]:
        time_s, prompt, output, adapter = line.split()
        number = int(adapter)
        found.append(Arrival(float(time_s), int(prompt), int(output), number if number >= 0 else None))
    return found


def calls_of(row: Mapping[str, Any]) -> Iterator[Call]:
    """The calls of a record, in order."""
    places = {name: place for place, name in enumerate(row["step_columns"])}
    for line in row["steps"]:
        values = line.split()
        started = float(values[places["started_s"]])
        work = StepWork(*(float(values[places[name]]) for name in StepWork._fields))
        ahead = values[places["ahead"]] == "1"
        names = values[places["beside"]]
        concurrent = 0 if names == "-" else 1 + names.count(",")
        ended = started + float(values[places["ms"]]) / 1e3
        copies = int(values[places["activate"]])
        yield Call(started, ended, concurrent, copies, ahead, work if work.steps else None)


def sizes_of(row: Mapping[str, Any], bytes_per_rank: float) -> dict[int, AdapterSize]:
    """The adapters of a record."""
    return adapters_of_ranks(row["engine"].get("ranks", []), bytes_per_rank)


def replica_config(result: Mapping[str, Any], row: Mapping[str, Any]) -> ReplicaConfig:
    """The configuration of the engine that served."""
    options, engine = result["options"], row["engine"]
    wait = engine.get("max_lora_wait_steps", SchedulerConfig.max_lora_wait_steps)
    pages, width = engine.get("pages", 0), engine["blocks_a_page"]
    own_pages = pages - -(-engine["kv_blocks"] // width) if pages else 0
    return ReplicaConfig(
        SchedulerConfig(options["max_num_seqs"], options["max_num_batched_tokens"], wait),
        CacheConfig(num_blocks=engine["kv_blocks"], enable_prefix_caching=False),
        LoRAConfig(options["rank"], engine.get("max_loras", 1), engine.get("max_cpu_loras", 1)),
        elastic=Elastic(own_pages, width) if pages else None,
        keeping=KEEPING[options.get("eviction_policy", "lru")],
        scheduling=SCHEDULING[options.get("scheduling_policy", "fcfs")],
    )


def put_in_place(replica: Replica, row: Mapping[str, Any]) -> None:
    """Put the adapters into memory and slots that were there when the traffic began, in the order of their last use.

    Adapters that the traffic does not name, which served earlier traffic, are left out.
    """
    in_memory, in_slots = (
        [a for a in row["engine"].get(where, []) if a in replica.ranks] for where in ("in_memory", "in_slots")
    )
    replica.seen.update(in_memory)
    for adapter_id in in_memory:
        replica.worker.add_adapter(lora_request(adapter_id))
    for adapter_id in replica.manager.list_active_adapters().keys() - set(in_slots):
        replica.manager.deactivate_adapter(adapter_id)
    for adapter_id in in_slots:
        replica.manager.activate_adapter(adapter_id)
