"""Seconds and bytes that something may take, and what it took."""

import ctypes
import os
import resource
import signal
from pathlib import Path

from patience import PATIENCE


class OutOfTime(BaseException):
    """Nobody may catch it who catches what adapters raise."""


class TimeLimit:
    """OutOfTime once this process has computed for so many seconds, or has waited for what never comes.

    What other processes compute meanwhile counts for nothing.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def end(*_: object) -> None:
            raise OutOfTime(f"gave up after {self.seconds} s")

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
