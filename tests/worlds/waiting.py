"""How long tests wait for what must come: so long that only what hangs is given up, beside a busy machine, too."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path


def threads_end(number: int) -> None:
    """At most so many threads are left, once those that were told to end have done so."""
    wait_until(
        lambda: threading.active_count() <= number
    )  # those of an earlier test may have ended meanwhile


PATIENCE = 120  # seconds
LOOKS = 20  # at threads that sleep, until nobody will wake them


def wait_until(condition: Callable[[], object]) -> None:
    """Return once the condition holds. AssertionError if it never does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it has not come after {PATIENCE} s"
        time.sleep(0.001)


async def some_turns() -> None:
    """Let the event loop do what is ready, and what becomes ready by that."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """As `wait_until`, while the event loop goes on."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def ends(thread: threading.Thread) -> bool:
    """Wait until a thread has ended. False: it never will, since it and all others sleep and nobody is left to wake it.

    That is known from the system, not from how long it takes: a thread for which a busy machine has no time does not
    sleep, it waits to run.
    """
    end, looks = time.monotonic() + PATIENCE, 0
    while thread.is_alive() and looks < LOOKS and time.monotonic() < end:
        before = _others_of_this_process()
        thread.join(0.05)
        looks = looks + 1 if before is not None and before == _others_of_this_process() else 0
    return not thread.is_alive()


def _others_of_this_process() -> list[tuple[str, ...]] | None:
    """Of each thread but this one: its id, and how often it has begun to sleep. None if one runs, or nobody knows."""
    found = []
    try:
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) != threading.get_native_id():
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                if not status["State"].strip().startswith("S"):
                    return None
                found.append(
                    (task.name, status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"])
                )
    except OSError:  # one has ended just now, or the system keeps no such files
        return None
    return found
