"""An event loop whose clock moves when nothing else can happen: nobody really sleeps, and a hang is seen at once."""

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTime(selectors.DefaultSelector):
    """Where the loop waits: it goes on to the next timer instead, unless a thread was begun that may have something.

    ahead   seconds that the loop's clock is ahead of the machine's
    """

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self._threads = 0.0, set(threading.enumerate())

    def select(self, timeout: float | None = None) -> list:
        if timeout is None or timeout <= 0 or not self._threads.issuperset(threading.enumerate()):
            return super().select(timeout)
        events = super().select(0)
        self.ahead += 0 if events else timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualTime()
        super().__init__(self._virtual)

    def time(self) -> float:
        return super().time() + self._virtual.ahead


def run(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """As `asyncio.run`, in virtual time; TimeoutError after so many seconds of it."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(asyncio.wait_for(coroutine, seconds))
