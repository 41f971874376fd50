"""The results of a simulation; the same for the same arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from minivllm.policies.replay import belady_hits
from minivllm.simulate.fleet import Fleet
from minivllm.simulate.replica import Served


def report(fleet: Fleet, price_per_hour: float = 2.5) -> dict[str, float]:
    """The results of a fleet. Times of a request count from its arrival; rates from the first arrival to the end.

    ttft_p50_ms, _p99_ms    until the first token
    tpot_p50_ms, _p99_ms    of each further token of a request, on average
    busy_share              of the replicas' time that steps take
    slot_hits, memory_hits  shares of requests with adapters that find theirs in a slot, or in memory, on arrival
    memory_hits_bound       the share that Belady's policy finds in as much memory, in each replica's order of arrivals
    copies, reads           into slots, and from disk
    prefix_hits             share of the prompt tokens of admitted requests that the prefix cache has
    jain                    Jain's index over adapters of their speed: output tokens by the seconds of their requests
    ttft_worst_adapter_ms   the mean time to first token of the adapter for which it is longest
    usd_per_million_tokens  of output, at `price_per_hour` for each replica

    ValueError if nothing was served.
    """
    if not fleet.requests:
        raise ValueError("nothing was served, so there is nothing to report; give at least one arrival")
    requests, replicas = fleet.requests, fleet.replicas
    counters = [replica.counters for replica in replicas]
    seconds = fleet.now - requests[0].arrival.time_s
    tokens = sum(served.arrival.output_tokens for served in requests)
    with_adapter = sum(c.with_adapter for c in counters)
    copies = sum(c.copies for c in counters)
    reads = sum(c.reads + replica.reader.num_reads for c, replica in zip(counters, replicas))
    stats = [replica.scheduler.kv_cache.prefix_cache_stats for replica in replicas]
    firsts = [served.first_s - served.arrival.time_s for served in requests]
    between = [
        (served.last_s - served.first_s) / (served.arrival.output_tokens - 1)
        for served in requests
        if served.arrival.output_tokens > 1
    ]
    return {
        "requests": len(requests),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(requests) / seconds,
        **_percentiles("ttft", firsts),
        **_percentiles("tpot", between),
        "steps": sum(c.steps for c in counters),
        "busy_share": sum(c.busy_s for c in counters) / (seconds * len(replicas)),
        "slot_hits": _share(sum(c.in_slot for c in counters), with_adapter),
        "memory_hits": _share(sum(c.in_memory for c in counters), with_adapter),
        "memory_hits_bound": memory_bound(fleet),
        "copies": copies,
        "copies_beside_steps": sum(c.concurrent_copies for c in counters),
        "reads": reads,
        "prefix_hits": _share(sum(s.hits for s in stats), sum(s.queries for s in stats)),
        "preemptions": sum(replica.scheduler.num_preemptions for replica in replicas),
        "jain": jain_index(list(speeds(requests).values())),
        "ttft_worst_adapter_ms": 1e3 * max(_mean_by_adapter(requests, firsts).values()),
        "usd_per_million_tokens": price_per_hour * len(replicas) * seconds / 3600 / tokens * 1e6,
    }


def memory_bound(fleet: Fleet) -> float:
    """Share of the requests with adapters that Belady's policy would find in memory, by the order of arrival."""
    found = wanted = 0
    for replica in fleet.replicas:
        of_replica = (served for served in fleet.requests if served.replica == replica.number)
        uses = [served.arrival.adapter for served in of_replica if served.arrival.adapter is not None]
        found += belady_hits(uses, replica.manager.capacity)
        wanted += len(uses)
    return _share(found, wanted)


def speeds(requests: Sequence[Served]) -> dict[int | None, float]:
    """Adapter -> output tokens of its requests, divided by the seconds from arrival to last token."""
    tokens: dict[int | None, float] = defaultdict(float)
    seconds: dict[int | None, float] = defaultdict(float)
    for served in requests:
        tokens[served.arrival.adapter] += served.arrival.output_tokens
        seconds[served.arrival.adapter] += served.last_s - served.arrival.time_s
    return {adapter: tokens[adapter] / seconds[adapter] for adapter in tokens}


def jain_index(values: Sequence[float]) -> float:
    """1 if all are alike, 1 / n if one of n has everything. Jain, Chiu and Hawe, 1984."""
    array = np.asarray(values, dtype=float)
    squares = len(array) * float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares else 1.0


def _mean_by_adapter(requests: Sequence[Served], seconds: Sequence[float]) -> dict[int | None, float]:
    of_adapter: dict[int | None, list[float]] = defaultdict(list)
    for served, one in zip(requests, seconds):
        of_adapter[served.arrival.adapter].append(one)
    return {adapter: sum(each) / len(each) for adapter, each in of_adapter.items()}


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ranks = np.percentile(seconds, (50, 99)) if seconds else (0.0, 0.0)
    return {f"{name}_p{rank}_ms": 1e3 * float(value) for rank, value in zip((50, 99), ranks)}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
