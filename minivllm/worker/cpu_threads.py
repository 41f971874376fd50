"""On how many CPU threads a step computes. Stands for vllm/v1/worker/cpu_worker.py (v0.22.1), which binds threads.

A parallel product waits for its slowest thread. Where other processes have some of the cores, that thread waits for a
core and the others wait for it: a step on two threads can take fifty times as long as on one. So the number of threads
is tried out on small products, at the start and when a step is slow.

What makes this longer than a call of `torch.set_num_threads`: with that call prompts' attention is 3 to 7 % slower
(`set_num_threads`). Without a look at slow steps, a trial that passes by chance beside busy processes would hold until
the next one; without pauses that double, every trial on all threads would cost such steps a stall.
"""

import contextlib
import ctypes
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from minivllm.config import EngineConfig

# A step is slow past so many times the shortest of its size. Contexts grow, and steps with them, so what is expected
# grows by `DRIFT` with each step.
SLOW, DRIFT = 2.0, 1.01
# All threads are tried again after a pause that doubles each time, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# Of the OpenMP that PyTorch is linked to; None where that is another library.
OMP_SET_NUM_THREADS = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)


class CPUThreads:
    """The number of threads of the next step.

    most     the number where nobody else computes
    reason   who decided: "asked for", "OMP_NUM_THREADS" and the like
    stalls   whether so many threads wait for each other; None = the number is never changed
    clock    seconds
    used     all numbers that something was computed on so far
    """

    def __init__(
        self,
        most: int,
        reason: str,
        stalls: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.number = self.most = most
        self.reason, self.clock = reason, clock
        self.stalls = stalls if most > 1 else None
        self.used: set[int] = set()
        # Seconds, by the size of a step.
        self._expected: defaultdict[int, float] = defaultdict(lambda: math.inf)
        self._pause, self._until = FIRST_PAUSE, math.inf
        self.choose()

    def __str__(self) -> str:
        of = f" of {self.most}" if self.stalls else ""
        return f"{self.number}{of} CPU thread{'s' * (self.most > 1)} ({self.reason})"

    def over_all(self) -> str:
        """As `str`, of all that was computed so far, where that names the number of now."""
        if len(self.used) < 2:
            return str(self)
        return (
            f"{min(self.used)} to {max(self.used)} of {self.most} CPU threads ({self.reason}, "
            "and fewer while other processes have the cores)"
        )

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
        number, before = self.number, torch.get_num_threads()
        self.used.add(number)
        if number != before:
            set_num_threads(number)
        try:
            yield
        finally:
            if number != before:
                set_num_threads(before)

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Around a step: on the chosen number, which is chosen anew once the pause is over."""
        if self.clock() >= self._until:
            self.choose()
        with self.in_use():
            yield

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Count a step of so many tokens; choose anew if it was slow, and more than one thread computed it."""
        if self.stalls is None or self.number == 1:
            return
        expected = self._expected[tokens.bit_length()]
        self._expected[tokens.bit_length()] = min(DRIFT * expected, seconds)
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
                if (seconds := time.perf_counter() - started) > allowed:
                    return True
            allowed = seconds
    finally:
        set_num_threads(before)
    return False


def cpu_threads(config: EngineConfig) -> CPUThreads:
    """What decides: `threads`; else OMP_NUM_THREADS; else all cores that the process may use, as far as PyTorch does.

    On a GPU only `threads` counts, since the host computes next to nothing.
    """
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
    """Have the calling thread compute on `number` threads, as `torch.set_num_threads` does, if OpenMP can be asked.

    PyTorch's own call also tells MKL the number, and to keep to it inside a parallel region. From then on each
    product in attention, which is one already, starts threads of its own and takes twice as long.
    """
    torch.get_num_threads()  # a thread's first question sets its number; it has to come before ours
    if OMP_SET_NUM_THREADS is not None:
        OMP_SET_NUM_THREADS(number)
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
