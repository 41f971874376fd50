"""On how many CPU threads a step computes. Stands for vllm/v1/worker/cpu_worker.py (v0.22.1), which binds threads.

A parallel product waits for its slowest thread, and where other processes have some of the cores, that thread waits for
a core: a step on two threads can take fifty times as long as on one. So small products try the number of threads.
"""

import contextlib
import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from minivllm.config import EngineConfig

# A step is slow past twice the shortest of its size. Contexts grow, and steps with them, by 1 % a step at most.
SLOW, DRIFT = 2.0, 1.01
FIRST_PAUSE, LONGEST_PAUSE = (
    1.0,
    60.0,
)  # seconds until all threads are tried again: doubled each time that they stall


class CPUThreads:
    """The number of threads of the next step.

    most     the number where nobody else computes        reason   who decided: "asked for", "OMP_NUM_THREADS", ...
    stalls   whether so many threads wait for each other; None = the number is never changed
    """

    def __init__(
        self,
        most: int,
        reason: str,
        stalls: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most, self.reason, self.clock = most, reason, clock
        self.stalls = stalls if most > 1 else None
        self._shortest: dict[int, float] = {}  # seconds, by the size of a step
        self._pause = FIRST_PAUSE
        self.choose()

    def __str__(self) -> str:
        of = f" of {self.most}" if self.stalls else ""
        return f"{self.number}{of} CPU thread{'s' * (self.most > 1)} ({self.reason})"

    def choose(self) -> None:
        """Halve the number until its threads do not wait for each other; fewer than all are taken for a pause."""
        self.number, self._until = self.most, math.inf
        while self.stalls and self.number > 1 and self.stalls(self.number):
            self.number //= 2
        if self.number < self.most:
            self._until = self.clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._pause = max(FIRST_PAUSE, self._pause / 2)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the calling thread computes on the chosen number."""
        before = torch.get_num_threads()
        set_num_threads(self.number)
        try:
            yield
        finally:
            set_num_threads(before)

    def around_step(self) -> contextlib.AbstractContextManager[None]:
        """`in_use` for a step: the number is chosen anew if the pause is over."""
        if self.clock() >= self._until:
            self.choose()
        return self.in_use()

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Count a step of so many tokens; choose anew if it was slow, and more than one thread computed it."""
        if self.stalls is not None and self.number > 1:
            size = tokens.bit_length()
            expected = DRIFT * self._shortest.get(size, math.inf)
            self._shortest[size] = min(expected, seconds)
            if seconds > SLOW * expected:
                self.choose()


def threads_stall(number: int, products: int = 24) -> bool:
    """Whether small products take longer on so many threads than on one: then threads wait for a core."""
    x, weight = torch.ones(8, 1024), torch.ones(1024, 1024)
    allowed, before = math.inf, torch.get_num_threads()
    try:
        for threads in (1, number):
            set_num_threads(threads)
            F.linear(x, weight)  # makes the threads
            started = time.perf_counter()
            for _ in range(products):
                F.linear(x, weight)
                if time.perf_counter() - started > allowed:
                    return True
            allowed = time.perf_counter() - started
    finally:
        set_num_threads(before)
    return False


def cpu_threads(config: EngineConfig) -> CPUThreads:
    """`threads` decides, else OMP_NUM_THREADS, else all cores that the process has. On a GPU the host needs no say."""
    if config.threads is not None:
        return CPUThreads(config.threads, "asked for")
    if torch.device(config.device).type == "cuda":
        return CPUThreads(torch.get_num_threads(), "the GPU computes")
    if os.environ.get("OMP_NUM_THREADS"):
        return CPUThreads(torch.get_num_threads(), "OMP_NUM_THREADS")
    return CPUThreads(min(torch.get_num_threads(), available_cores()), "all that may be used", threads_stall)


def available_cores() -> int:
    """Cores that the process may run on, or what its container's quota comes to."""
    import loky  # late: only an engine on a CPU asks

    return loky.cpu_count()


def set_num_threads(number: int) -> None:
    """Have the calling thread compute on `number` threads, by OpenMP where it can be asked.

    `torch.set_num_threads` also tells MKL to keep to the number inside a parallel region: each product in attention,
    which is one already, then starts threads of its own and takes twice as long.
    """
    if (
        torch.get_num_threads() != number
    ):  # a thread's first question sets its number; it has to come before ours
        for set_in_openmp in _openmp():
            set_in_openmp(number)
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)


@functools.cache
def _openmp() -> list[Callable[[int], None]]:
    """`omp_set_num_threads` of the OpenMP that PyTorch brings along, if it does."""
    lib = Path(torch.__file__).parent / "lib"
    return [ctypes.CDLL(str(path)).omp_set_num_threads for path in lib.glob("lib*omp[-.5]*")]
