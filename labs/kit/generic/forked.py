"""Functions that run in a fork of this process, where whatever they change is gone with them."""

import asyncio
import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

MOST_CPU = 2.0  # seconds of computing
LONGEST = 10.0  # seconds in all; what takes longer waits for a thread that a fork has not

fork = os.fork  # for us alone: learners' code may not start processes (`labs.kit.limits`)


def in_fork(function: Callable[[], Any]) -> Any:
    """What the function returns, which must be something that can be pickled. None where it did not come to its end."""
    receiver, sender = os.pipe()
    loop = asyncio._get_running_loop()
    child = fork()
    if not child:
        _run(function, sender, loop)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(answer) if answer else None


def _run(function: Callable[[], Any], sender: int, loop: asyncio.AbstractEventLoop | None) -> None:
    try:
        for ends, timer, seconds in (
            (signal.SIGALRM, signal.ITIMER_REAL, LONGEST),
            (signal.SIGPROF, signal.ITIMER_PROF, MOST_CPU),
        ):
            signal.signal(ends, signal.SIG_DFL)
            signal.setitimer(timer, seconds)
        asyncio._set_running_loop(loop)  # the loop that runs is another process's, or so asyncio thinks
        gc.disable()  # it would write to all pages
        _be_silent()
        _stop_clocks()
        with os.fdopen(sender, "wb") as pipe:
            pipe.write(pickle.dumps(function()))
    finally:
        os._exit(0)


def _be_silent() -> None:
    """What a learner's code prints is shown once."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.stdout = sys.stderr = os.fdopen(nothing, "w")


def _stop_clocks() -> None:
    """So that what is noted of the time does not differ from one run to the next."""
    for name in ("time", "monotonic", "perf_counter"):
        now = getattr(time, name)()
        setattr(time, name, lambda now=now: now)
