"""Seconds and bytes that something may take, and what it took."""

import ctypes
import gc
import os
import resource
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from tests.worlds.waiting import PATIENCE


class OutOfTime(BaseException):
    """Nobody may catch it who catches what adapters raise."""


class TimeLimit:
    """OutOfTime once this process has computed for so many seconds, or has waited for what never comes.

    What other processes compute meanwhile counts for nothing.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def end(number: int, frame: FrameType) -> None:
            did = "computed" if number == signal.SIGVTALRM else "waited"
            code = frame.f_code
            raise OutOfTime(
                f"{did} until the limit of {self.seconds} s, in {code.co_filename}:{frame.f_lineno}"
            )

        self.old = {number: signal.signal(number, end) for number in (signal.SIGVTALRM, signal.SIGALRM)}
        signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds)
        signal.setitimer(signal.ITIMER_REAL, max(PATIENCE, self.seconds))

    def __exit__(self, *_: object) -> None:
        for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, old in self.old.items():
            signal.signal(number, old)


class Peak:
    """By how many bytes this process has grown at most; the kernel keeps count, and starts anew when asked.

    What the process has freed and kept is given back first: growing into it would not count.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._status("VmHWM")

    def growth(self) -> int:
        return self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name))
        return 1024 * int(line.split()[1])


def limit_memory(gigabytes: float) -> None:
    """A bomb fails in this process before it harms the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + int(gigabytes * 2**30),) * 2)


def allocated_by(run: Callable[[], Any], with_numpy: bool = False) -> tuple[Any, int]:
    """What `run` returns, and the bytes that PyTorch's CPU allocator gave out meanwhile and has not got back.

    with_numpy   NumPy's as well: adapters are read into its arrays
    """
    gc.collect()  # else what others left would be given back in here
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
        gc.collect()
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    of_numpy = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)
    tracemalloc.stop()
    events = profiler.profiler.kineto_results.events()
    return result, with_numpy * of_numpy + sum(
        event.nbytes() for event in events if event.name() == "[memory]"
    )


def live_bytes(device: str = "cpu") -> int:
    """Bytes of all memory that tensors anywhere in the process hold; also on "meta", where nothing is allocated."""
    gc.collect()
    # By their types: not every object likes to be asked what it is, and it takes long.
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.layout == torch.strided]
    return sum(
        s.nbytes() for s in {tensor.untyped_storage() for tensor in tensors} if s.device.type == device
    )
