"""What an engine measured over time: forward passes by batch size, memory, and adapters that were refused.

Stands for nothing in vLLM (v0.22.1), whose operators have this from Prometheus.
"""

import resource
import sys
import time
from collections import deque
from typing import NamedTuple

import torch

from minivllm.core.output import SchedulerOutput
from minivllm.engine.core import EngineCore
from minivllm.lora.events import LoRAEvent

# Samples and refusals that are kept, the last ones. A sample stands for SECONDS_APART at least, so these go back two
# minutes or more.
MOST_SAMPLES, SECONDS_APART, MOST_REFUSALS = 500, 0.25, 32


class MemorySample(NamedTuple):
    """Bytes in use at one time.

    time_s      seconds since the engine was made
    kv_cache    of blocks that requests or the prefix cache hold
    adapters    of the adapters in memory, each counted by itself
    """

    time_s: float
    kv_cache: int
    adapters: int


class Refusal(NamedTuple):
    """An adapter that could not be served: when, in seconds since the epoch, its id, and why in a sentence."""

    time: float
    adapter_id: int
    reason: str


class History:
    """Listens to the steps of an engine (`__call__`) and to what happens to its adapters (`hear`).

    forward        rows of a batch -> [steps, seconds] of its forward passes
    memory         samples, the last ones
    peak_kv_cache, peak_adapters   the most bytes: of blocks over all steps, of adapters over all samples
    refusals, num_refusals         the last ones, and how many in all
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.forward: dict[int, list[float]] = {}
        self.memory: deque[MemorySample] = deque(maxlen=MOST_SAMPLES)
        self.peak_kv_cache = self.peak_adapters = 0
        self.refusals: deque[Refusal] = deque(maxlen=MOST_REFUSALS)
        self.num_refusals = 0
        self._started = engine.clock()
        self._in_pass: tuple[int, int, float] | None = None  # rows, and the counters before them
        self._bytes: dict[int, int] = {}  # load_id -> bytes of an adapter

    def __call__(self, output: SchedulerOutput) -> None:
        """A step was launched. Its seconds are known once the counters have moved on, which the next call sees."""
        self.settle()
        metrics = self.engine.metrics
        self._in_pass = len(output.scheduled), metrics.steps, metrics.forward_seconds
        kv_cache = self._kv_cache_bytes()
        self.peak_kv_cache = max(self.peak_kv_cache, kv_cache)
        now = self.engine.clock() - self._started
        if not self.memory or now - self.memory[-1].time_s >= SECONDS_APART:
            sample = MemorySample(now, kv_cache, self._adapter_bytes())
            self.peak_adapters = max(self.peak_adapters, sample.adapters)
            self.memory.append(sample)

    def settle(self) -> None:
        """Count the step launched last, if it came to its end."""
        metrics = self.engine.metrics
        if self._in_pass is not None and metrics.steps == self._in_pass[1] + 1:
            of_size = self.forward.setdefault(self._in_pass[0], [0, 0.0])
            of_size[0] += 1
            of_size[1] += metrics.forward_seconds - self._in_pass[2]
            self._in_pass = None

    def hear(self, event: LoRAEvent) -> None:
        """Something happened to an adapter."""
        if event.kind == "refuse":
            self.num_refusals += 1
            self.refusals.append(Refusal(time.time(), event.adapter_id, event.reason))

    def as_dict(self) -> dict[str, object]:
        """All of it as plain values.

        forward_by_rows    rows of a batch -> steps, and seconds in their forward passes
        memory_over_time   samples, at most one in SECONDS_APART
        peak_memory        bytes: of KV blocks and adapters in use; of the whole process; on a GPU, of its allocator
        errors             refused adapters and failed requests, counted, and the last refusals
        """
        self.settle()
        on_gpu = self.engine.runner.on_gpu
        return {
            "forward_by_rows": {
                rows: {"steps": int(steps), "seconds": seconds}
                for rows, (steps, seconds) in sorted(self.forward.items())
            },
            "memory_over_time": [sample._asdict() for sample in self.memory],
            "peak_memory": {
                "kv_cache": self.peak_kv_cache,
                "adapters": self.peak_adapters,
                "process": _peak_of_process(),
                "device": torch.cuda.max_memory_allocated() if on_gpu else 0,
            },
            "errors": {
                "adapters_refused": self.num_refusals,
                "requests_failed": self.engine.metrics.finished["error"],
                "recent": [refusal._asdict() for refusal in self.refusals],
            },
        }

    def _kv_cache_bytes(self) -> int:
        pool = self.engine.scheduler.kv_cache.block_pool
        return (pool.num_usable_blocks - len(pool.free)) * self.engine.runner.kv_block_bytes

    def _adapter_bytes(self) -> int:
        """An adapter is counted when it is first seen: it has hundreds of tensors, and a sample has no time for all."""
        if self.engine.adapters is None:
            return 0
        here = {lora.load_id: lora for lora in self.engine.adapters.manager.list_adapters().values()}
        self._bytes = {i: self._bytes.get(i) or lora.nbytes for i, lora in here.items()}
        return sum(self._bytes.values())


def _peak_of_process() -> int:
    """Bytes; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
