"""What ends tests that run for ever, start processes or take all of the memory, on whatever machine.

How long an exercise's tests may compute is measured, not guessed: when a job is late, the same tests run on our code
beside it, and the job gets `FACTOR` times their CPU time, but no less than `LEAST`. So a slow machine gives more. CPU
time does not pass while other programs use the cores, so a busy machine gives as much as an idle one. A job waits only
while none of its threads could run: the time for which they stand in line for a core does not count as waiting.
Where there is no /proc (macOS) the clock on the wall stands for all of this.
"""

import faulthandler
import mmap
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple

NO_END = "no end after"  # so many seconds
FACTOR = 20.0  # times as long as on our code
LEAST = 10.0  # seconds; most exercises' tests compute for half a second
MOST = 60.0  # seconds, unless our code takes more than `MOST / SLOW`
SLOW = 4.0  # times as long as on our code is not too long on the slowest machine either
ASK = 0.7 * LEAST  # seconds after which it is found out how long our code takes
PATIENCE = 3.0  # how many times as long they may take in all, time in line for a core left out
IDLE = 0.05  # a job that computes for less than this share of its limit waits for what never comes
GRACE = 3.0  # seconds that a test has for its end once it was told, before its processes are killed
LONG = 5.0  # seconds of computing after which a learner is told which test is running
LONG_BY_THE_CLOCK = 30.0  # and seconds on a busy machine, where a right answer, too, may take as many
LOOK = 0.5  # seconds between looks at the processes
GONE = 0.2  # seconds between looks at whether the parent is there
ALONE = 600  # seconds that a process may compute whose parent, which would have ended it, was killed
MOST_PROCESSES = 64  # of one job
ROOM = 3 << 30  # bytes that a job may take beside what it begins with
REPORTING = 1 << 30  # bytes more to say in that there were too few
END, TRACE = signal.SIGUSR1, signal.SIGQUIT
LONGEST_WHY = 256  # bytes

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_PROC = Path("/proc")


def limit_of(usual: float) -> float:
    """Seconds that tests may compute which take `usual` seconds on our code."""
    return max(LEAST, min(FACTOR * usual, MOST), SLOW * usual)


class Use(NamedTuple):
    """What the processes of a session have used, those that have ended left out unless a parent has waited for them.

    seconds   of CPU time
    in_line   seconds that their threads could have run and no core was free
    """

    processes: int
    seconds: float
    in_line: float


def use_of(session: int) -> Use | None:
    """Of a session by its number, which is that of its first process. None where there is no /proc."""
    if not _PROC.is_dir():
        return None
    ticks, processes, seconds, in_line = os.sysconf("SC_CLK_TCK"), 0, 0.0, 0
    for name in filter(str.isdigit, os.listdir(_PROC)):
        with suppress(OSError):  # one that has ended
            # A program's name stands in brackets, and may have blanks in it.
            fields = (_PROC / name / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            processes += fields[0] != "Z"
            seconds += sum(map(int, fields[11:15])) / ticks
            for thread in os.listdir(_PROC / name / "task"):
                in_line += int((_PROC / name / "task" / thread / "schedstat").read_text().split()[1])
    return Use(processes, seconds, in_line / 1e9)


class Watch:
    """Over the session of one child: what it has used, and whether it computes or waits for too long."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.started = self.looked_at = self.last_busy_at = time.monotonic()
        self.use = Use(1, 0.0, 0.0)
        self._busy = 0.0  # seconds of computing and standing in line, when there last were enough of them

    def look(self) -> bool:
        """Whether it was time to look again."""
        now = time.monotonic()
        if now - self.looked_at < LOOK:
            return False
        self.looked_at = now
        # One that has just ended is gone from /proc with what it used.
        use = use_of(self.session) or Use(1, now - self.started, 0.0)
        self.use = Use(use.processes, *map(max, use[1:], self.use[1:]))
        return True

    def is_late(self, limit: float, patience: float) -> str | None:
        """What has taken longer than `limit` seconds, `computing` or `waiting`; None if nothing has."""
        _, seconds, in_line = self.use
        if seconds > limit:
            return "computing"
        if seconds + in_line > self._busy + IDLE * limit:
            self._busy, self.last_busy_at = seconds + in_line, self.looked_at
        waits = self.looked_at - self.last_busy_at > limit
        drags = self.looked_at - self.started - in_line > patience * limit
        return "waiting" if waits or drags else None


class Ends:
    """How a child is brought to its end by its parent. Made before the fork, and used on both sides of it."""

    def __init__(self) -> None:
        self._why = mmap.mmap(-1, LONGEST_WHY)  # a sentence, which the parent writes before it sends a signal
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - where the child is, written by its signal handler

    def prepare(self, interruptible: Collection[str], fail: Callable[[str], None]) -> None:
        """In the child, once: it starts a session of its own, and signals end its test or say where it is.

        interruptible   files; a test is ended while code of one of them runs, and pytest's own work never is
        fail            raises, with a sentence
        """
        begin_session()

        def end(number: int, frame: FrameType | None) -> None:
            if not _files_of(frame).isdisjoint(interruptible):
                fail(self._why[:].rstrip(b"\0").decode())

        signal.signal(END, end)
        # Both are written in C, so that they come through where no line of Python ends.
        faulthandler.enable(self._trace)
        faulthandler.register(TRACE, self._trace)

    def tell(self, child: int, why: str | None = None) -> None:
        """In the parent: the test that runs is to end.   why: None = as it was told before"""
        if why is not None:
            self._why[:] = why.encode()[:LONGEST_WHY].ljust(LONGEST_WHY, b"\0")
        with suppress(ProcessLookupError):
            os.kill(child, END)

    def ask_where(self, child: int) -> None:
        """In the parent, before it kills a child that does not end."""
        with suppress(ProcessLookupError):
            os.kill(child, TRACE)
            until, before = time.monotonic() + GRACE, 0
            while (size := self._size()) != before or (not size and time.monotonic() < until):
                before = size
                time.sleep(0.02)

    def places(self) -> list[tuple[str, int]]:
        """(file, line) of what ran when the child was asked, or when it crashed; the innermost call first."""
        text = os.pread(self._trace.fileno(), self._size(), 0).decode(errors="replace")
        return [(path, int(line)) for path, line in _FRAME.findall(text)]

    def _size(self) -> int:
        return os.fstat(self._trace.fileno()).st_size

    def close(self) -> None:
        self._trace.close()


def _files_of(frame: FrameType | None) -> set[str]:
    """Those of the calls that a frame is in."""
    files = set()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return files


def begin_session() -> None:
    """In a child: it and whatever it starts can be watched and ended together, and end should its parent be killed."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (ALONE, ALONE))


def end_with(parent: int) -> None:
    """In the first process of a session: kill all of it once `parent`, which started it, is gone, however it ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(GONE)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lab-parent", daemon=True).start()


def kill_session(leader: BaseProcess) -> None:
    """A child and whatever it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.kill()  # it may have had no session of its own yet


def limit_memory(room: int = ROOM) -> None:
    """MemoryError for this process once it takes so many bytes more than now. Linux alone."""
    status = _PROC / "self" / "status"
    if status.exists():
        used = 1024 * int(re.search(r"^VmData:\s+(\d+)", status.read_text(), re.MULTILINE)[1])
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room + REPORTING))


@contextmanager
def room_to_report() -> Iterator[None]:
    """While it lasts there is memory to say that there was too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def refuse_forks(learners: Collection[str], fail: Callable[[str], None]) -> None:
    """`os.fork` fails where code of these files has called for it: each copy would go on with the tests."""

    def guarded(fork: Callable[[], int]) -> Callable[[], int]:
        def guard() -> int:
            if not _files_of(sys._getframe()).isdisjoint(learners):
                fail("it starts a process, which no exercise asks for")
            return fork()

        return guard

    os.fork, os.forkpty = guarded(os.fork), guarded(os.forkpty)
