"""What reading adapters costs, from a record of traffic: for those who wait for a read, and for the steps beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.replay import Replayed, replay


class ReadTraffic(NamedTuple):
    """A row of `benchmarks.engine serve` whose adapters' files were in memory, and its calls replayed."""

    row: Mapping[str, Any]
    calls: list[Replayed]


class Reads(NamedTuple):
    """model: fields of `CostModel`; shares: what each read took of what the model says"""

    model: dict[str, float]
    shares: list[float]


def costs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(F,) costs, none below 0, with the least squares of `x @ costs - y`: x (M, F), y (M,).

    Columns of one length: where two kinds of work always come together, the units of neither decide which one costs.
    """
    scale = np.linalg.norm(x, axis=0)
    scale[scale == 0] = 1.0
    return nnls(x / scale, y)[0] / scale


def reads_of(result: Mapping[str, Any], row: Mapping[str, Any]) -> ReadTraffic | None:
    """None if nothing was read."""
    if not row.get("loads") or not row.get("load_seconds"):
        return None
    return ReadTraffic(row, replay(result, row)[0])


def fit_reads(traffic: ReadTraffic, known: CostModel) -> Reads:
    """What a read takes if it shares the host with none, neither another one nor the engine.

    known   says what the engine's host does before steps
    """
    row, calls = traffic
    lasted = read_from_to(calls)
    works = list(engine_works(calls, known))
    alone = np.array([alone_seconds(each, lasted.values(), works) for each in lasted.values()])
    # A read is seen to have ended when the next call runs its adapter; the record says how long they took in truth.
    seen = np.mean([end - begin for begin, end in lasted.values()])
    alone *= row["load_seconds"] / row["loads"] / seen
    ranks = [row["engine"]["ranks"][adapter_id - 1] for adapter_id in lasted]
    x = np.stack([np.ones(len(alone)), known.bytes_per_rank * np.array(ranks, dtype=float)], axis=1)
    found = costs(x, alone)
    unpack_s, per_byte = found.tolist()
    speed = 1 / per_byte if per_byte else float("inf")
    model = {"unpack_s": unpack_s, "unpack_bytes_per_s": speed, "read_bytes_per_s": float("inf")}
    return Reads(model, (alone / (x @ found)).tolist())


def engine_works(calls: Sequence[Replayed], known: CostModel) -> Iterator[tuple[float, float]]:
    """From when to when the engine's own thread had much to do: at a call's begin, and kernels at its end."""
    for one in calls:
        started, ended = one.call.started_s, one.call.ended_s
        if seconds := known.host_seconds(one.held) * one.held.stretch:
            yield started, started + seconds
        if one.work and (seconds := known.launch_seconds(one.work) * one.held.stretch):
            yield ended - seconds, ended


def read_from_to(calls: Sequence[Replayed]) -> dict[int, tuple[float, float]]:
    """Adapter id -> when its read began and ended, of those that ended."""
    began: dict[int, float] = {}
    found = {}
    for call in calls:
        started = call.call.started_s
        for adapter_id in began.keys() - call.reading:
            found[adapter_id] = began.pop(adapter_id), started
        began |= dict.fromkeys(call.reading - began.keys(), started)
    return found


def alone_seconds(
    one: tuple[float, float],
    reads: Collection[tuple[float, float]],
    works: Collection[tuple[float, float]] = (),
) -> float:
    """What a read would have taken if it had shared the host with no other one, and with no work of the engine."""
    begin, end = one
    times = sorted({begin, end, *(t for each in (*reads, *works) for t in each if begin < t < end)})
    seconds = 0.0
    for since, until in pairwise(times):
        sharing = sum(b <= since and until <= e for b, e in reads)
        sharing += any(b <= since and until <= e for b, e in works)
        seconds += (until - since) / sharing
    return seconds
