"""What is left once something has ended."""

import threading

from patience import wait_until


def threads_end(number: int) -> None:
    """At most so many threads are left, once those that were told to end have done so."""
    wait_until(
        lambda: threading.active_count() <= number
    )  # those of an earlier test may have ended meanwhile
