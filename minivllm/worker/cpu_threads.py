"""On how many CPU threads a step computes. Stands for vllm/v1/worker/cpu_worker.py (v0.22.1), which binds threads.

A parallel product waits for its slowest thread. Where other processes have some of the cores, that thread waits for a
core, and the others wait for it: four threads on two free cores can be twenty times slower than one. So the number is
measured on products of the model itself. It is measured again when steps become slow, or some time has passed.
"""

import contextlib
import functools
import math
import os
import re
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.config import EngineConfig
from minivllm.layers.linear import LinearBase
from minivllm.worker.openmp import set_num_threads

CGROUP = Path("/sys/fs/cgroup")
# For each number of threads: one pass that is not timed, then so many that are.
PASSES = 4
# A pass multiplies weights of so many elements in all, by at most so many rows.
WEIGHTS = 2**25
ROWS = 8
# Another number is taken only if its time is below so much of the best one's.
GAIN = 0.95
# After so many numbers in a row that were not faster, no larger one is tried.
DUDS = 2
# A step is slow past so many times what it should take. What it takes beyond that is counted as lost.
SLOW = 2.0
# The pause until the next measurement: at first so many times what one takes, at most so many seconds.
FIRST_PAUSE = 100
LONGEST_PAUSE = 60.0
ASKED_FOR = "asked for"

Part = Callable[[], Any]


class CPUThreads:
    """The number of threads, and how it came about.

    number       threads that a step computes on
    reason       who decided: "asked for", "OMP_NUM_THREADS", "measured" and the like
    candidates   ascending; more than one only where the number is measured
    parts        a step's products, one call each: what is measured (`measure_on`)
    clock        seconds
    seconds      that the last `run` took: after the warm-up, its last step. None before
    apply        sets the calling thread's number; `current` reads it

    Outside `in_use` the process keeps the number that it had.
    """

    def __init__(
        self,
        number: int,
        reason: str,
        candidates: Sequence[int] = (),
        parts: Sequence[Part] = (),
        clock: Callable[[], float] = time.perf_counter,
        apply: Callable[[int], None] = set_num_threads,
        current: Callable[[], int] = torch.get_num_threads,
    ) -> None:
        self.number, self.reason = number, reason
        self.candidates = list(candidates) or [number]
        self.parts, self.clock, self.apply, self.current = parts, clock, apply, current
        self.measurements = 0
        self.seconds: float | None = None
        self._pass_seconds = math.inf  # of all parts, on `number` threads
        self._cost = self._pause = self._lost = 0.0
        self._due = -math.inf
        self._all_are_free = False
        # A step's seconds divided by a pass's, by the size of the step: slower cores change both alike.
        self._ratios: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=15))

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.candidates) > 1

    def __str__(self) -> str:
        of = f" of {self.candidates[-1]}" if self.is_open else ""
        return f"{self.number}{of} CPU thread{'s' * (max(self.candidates) > 1)} ({self.reason})"

    @property
    def is_pytorchs(self) -> bool:
        """Whether it is the number that PyTorch has by itself, with no other to choose: steps need not set it."""
        return not self.is_open and self.reason != ASKED_FOR and self.number == self.current()

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Around a step: on the chosen number, which is measured again first where it is time for that."""
        self.before_step()
        with self.in_use():
            yield

    @contextlib.contextmanager
    def in_use(self, number: int | None = None) -> Iterator[None]:
        """Inside, the calling thread computes on `number` threads, None = on the chosen number."""
        number, before = number or self.number, self.current()
        if number == before:
            yield
            return
        self.apply(number)
        try:
            yield
        finally:
            self.apply(before)

    def run(self, work: Callable[[], Any]) -> None:
        """Do that on the chosen number, and keep how long it took in `seconds`."""
        started = self.clock()
        with self.in_use():
            work()
        self.seconds = self.clock() - started

    def measure_on(self, model: nn.Module, rows: int, dtype: torch.dtype) -> None:
        """Measure on a model's own products, with at most `rows` rows each."""
        if self.is_open:
            self.parts = products(model, min(ROWS, rows), dtype)
            self._due = -math.inf

    def start_with_all(self) -> None:
        """Take the largest number, which the process has already; what is in use works best if it is never changed."""
        self.number, self.reason, self._all_are_free = self.candidates[-1], "all are free", True

    def _time_all(self) -> None:
        """What a pass takes on the largest number: steps that take longer than that say when to measure."""
        started = self.clock()
        self._pass_seconds = self._time(self.number, math.inf)
        self._cost, self._lost, self._due = self.clock() - started, 0.0, math.inf
        self._all_are_free = False

    def settle(self) -> None:
        """Stay with the number there is: no more measurements."""
        self.candidates = [self.number]

    # ---- measuring ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def measure(self, from_the_start: bool = True) -> None:
        """Take the fastest number, if there is a choice.

        from_the_start   begin with the smallest number; False: with one a little below the current

        A number is given up as soon as it has taken longer than the best so far. So to try four threads on two cores
        costs next to nothing.
        """
        if not self.is_open:
            return None
        if self._all_are_free:
            return self._time_all()
        started, before, is_first = self.clock(), self.number, self.measurements == 0
        first = 0 if from_the_start else max(0, self.candidates.index(before) - DUDS)
        best, duds, seconds = self.candidates[first], 0, {}
        for number in self.candidates[first:]:
            seconds[number] = self._time(number, seconds.get(best, math.inf))
            if number == best or seconds[number] < GAIN * seconds[best]:
                best, duds = number, 0
            else:
                duds += 1
            if duds == DUDS:
                break
        # What is in use stays unless another one is clearly faster.
        if not is_first and seconds[best] > GAIN * seconds.get(before, math.inf):
            best = before
        self.number, self._pass_seconds = best, seconds[best]
        self.measurements += 1
        self.reason = "measured"
        self._cost, self._lost = self.clock() - started, 0.0
        is_news = is_first or best != before
        self._pause = min(FIRST_PAUSE * self._cost if is_news else 2 * self._pause, LONGEST_PAUSE)
        self._due = self.clock() + self._pause
        return None

    def _time(self, number: int, limit: float) -> float:
        """Seconds of one pass over the parts; infinite as soon as they are clearly more than `limit`."""
        with self.in_use(number):
            # The first pass makes threads and oneDNN's primitives for them.
            for passes, allowed in ((1, 2 * PASSES * limit), (PASSES, PASSES * limit / GAIN)):
                started = self.clock()
                for _ in range(passes):
                    for part in self.parts:
                        part()
                        if self.clock() - started > allowed:
                            return math.inf
        return (self.clock() - started) / PASSES

    # ---- beside the steps -----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Measure again if it is time, or if steps have lost more than it costs."""
        if self.is_open and (self._lost > self._cost or self.clock() >= self._due):
            self.measure(from_the_start=self._lost > self._cost or not self.measurements)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Count a step that took so long on the chosen number, and what it lost."""
        if not self.is_open:
            return
        ratios = self._ratios[tokens.bit_length()]
        if len(ratios) >= 3:
            expected = statistics.median(ratios) * self._pass_seconds
            self._lost += max(0.0, seconds - SLOW * expected)
        ratios.append(seconds / self._pass_seconds)


def cpu_threads(config: EngineConfig) -> CPUThreads:
    """What decides the number: `threads`; else OMP_NUM_THREADS; else it is measured (`measure_on` says on what).

    What is measured is at most PyTorch's number, and the cores that the process may run on (`available_cores`). It is
    measured at once, on `stand_ins`: a model is read with a number already. Where nobody else computes, all there are
    is the number, until steps are slow. On a GPU only `threads` counts, since the host computes next to nothing.
    """
    now = torch.get_num_threads()
    if config.threads is not None:
        return CPUThreads(config.threads, ASKED_FOR)
    if torch.device(config.device).type == "cuda":
        return CPUThreads(now, "the GPU computes")
    if os.environ.get("OMP_NUM_THREADS"):
        return CPUThreads(now, "OMP_NUM_THREADS")
    most = min(now, available_cores())
    threads = CPUThreads(1, "all there are", numbers_up_to(most))
    if threads.is_open and now == most and nobody_else_computes():
        threads.start_with_all()
    elif threads.is_open:
        threads.parts = stand_ins()
        threads.measure()
        threads.parts = ()  # they take as much memory as a small model
    return threads


def nobody_else_computes(loadavg: Path = Path("/proc/loadavg"), looks: int = 5) -> bool:
    """Whether this thread was the only one of the whole machine that ran, however often one looked."""
    for _ in range(looks):
        if not re.match(r"\S+ \S+ \S+ 1/", _read(loadavg)):
            return False
        time.sleep(0.002)
    return True


def stand_ins() -> list[Part]:
    """Products for before a model is read: packing its weights fits them to the number of threads that packs them."""
    side = 2048
    weights = torch.ones(WEIGHTS // 2 // side**2, side, side)
    return [functools.partial(F.linear, torch.ones(ROWS, side), weight) for weight in weights]


def products(model: nn.Module, rows: int, dtype: torch.dtype) -> list[Part]:
    """The first linears of a model, each with `rows` rows: so many that their weights do not stay in a cache."""
    parts: list[Part] = []
    left = WEIGHTS
    for module in model.modules():
        if isinstance(module, LinearBase) and left > 0:
            x = torch.zeros(rows, module.input_size_per_partition, dtype=dtype)
            parts.append(functools.partial(LinearBase.forward, module, x))  # without waiting for others
            left -= x.shape[1] * module.output_size_per_partition
    return parts


def numbers_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 and so on, and `most`."""
    steps = sorted({1} | {base << power for base in (2, 3) for power in range(most.bit_length())})
    return [*(number for number in steps if number < most), most]


def available_cores() -> int:
    """Cores that the process may run on, or what its control group's quota comes to, rounded down; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, cpu_quota())))


def cpu_quota(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time that control groups, version 2 or 1, leave the process; infinite without a limit.

    root         where they are mounted
    membership   which of them the process is in; a container sees its own as the root
    """
    quotas = [math.inf]
    for line in _read(membership).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / path.strip("/")
        # A limit of any group above counts too.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            quota, period = _read_quota(folder, is_version_2=not controllers)
            if quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas)


def _read_quota(folder: Path, is_version_2: bool) -> tuple[int, int]:
    """Microseconds of computing, and of the period they are for; zeros where there is no limit."""
    if is_version_2:
        words = _read(folder / "cpu.max").split()
    else:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max" and -1 are no limit
        return 0, 0
    return int(words[0]), int(words[1])


def _read(path: Path) -> str:
    """Empty where there is no such file, or nobody may read it."""
    try:
        return path.read_text()
    except OSError:
        return ""
