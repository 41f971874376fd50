"""Time of work on a device, without the time it takes to ask for it."""

import time
from collections.abc import Callable

import numpy as np
import torch

# Microseconds that a graph is replayed for between two readings of the clock, unless one replay takes longer.
ROUND_US = 10_000


def replay_us(run: Callable[[], object], times: int) -> float:
    """Microseconds a call, by the GPU's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / times


def wall_us(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)


def medians_us(
    works: dict[str, Callable[[], object]], device: torch.device, rounds: int = 5
) -> dict[str, float]:
    """Median microseconds of each, in turns: a GPU at its power limit then slows all alike.

    works   name -> graph, replayed, or on a CPU what is called
    """
    if device.type != "cuda":
        times = {name: [wall_us(work) for _ in range(rounds)] for name, work in works.items()}
        return {name: float(np.median(found)) for name, found in times.items()}
    counts = {name: int(max(1, ROUND_US // max(1, replay_us(work, 2)))) for name, work in works.items()}
    turns = [
        {name: replay_us(work, min(20, counts[name])) for name, work in works.items()} for _ in range(rounds)
    ]
    return {name: float(np.median([turn[name] for turn in turns])) for name in works}


def replayable(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`work` as `medians_us` takes it."""
    return capture(work).replay if device.type == "cuda" else work


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which is run twice before, as libraries and compilers want it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def copy_bandwidth(device: torch.device, count: int = 2**31) -> float:
    """Bytes a second, read and written together, of a copy within the device's memory."""
    count = count if device.type == "cuda" else 2**24
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = replayable(lambda: target.copy_(source), device)
    return 2 * count / medians_us({"copy": copy}, device)["copy"] * 1e6
