"""Time of work on a device, without the time it takes to ask for it."""

import time
from collections.abc import Callable

import numpy as np
import torch


def median_us(work: Callable[[], object], device: torch.device, replays: int = 20, repeats: int = 7) -> float:
    """Median microseconds of `work`: replayed from a CUDA graph, or called where there are none."""
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(1e6 * (time.perf_counter() - started))
        return float(np.median(times))
    graph = capture(work)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / replays)
    return float(np.median(times))


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
    return 2 * count / median_us(lambda: target.copy_(source), device, replays=3) * 1e6
