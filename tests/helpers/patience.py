"""How long tests wait for what must come: so long that only what hangs is given up, beside a busy machine, too."""

import asyncio
import time
from collections.abc import Callable

PATIENCE = 120  # seconds


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
