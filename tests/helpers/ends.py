"""What is left once something has ended."""

import threading
import time

SOON = 10  # seconds


def threads_end(number: int) -> None:
    """At most so many threads are left, once those that were told to end have done so."""
    deadline = time.monotonic() + SOON
    while threading.active_count() > number and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() <= number  # those of an earlier test may have ended meanwhile
