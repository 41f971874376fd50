"""What is left once something has ended."""

import threading


def threads_end(number: int) -> None:
    """At most so many threads are left, once those of the engine that were told to end have done so."""
    for thread in threading.enumerate():
        if thread.name.startswith("minivllm"):
            thread.join(timeout=10)
    assert threading.active_count() <= number  # those of an earlier test may have ended meanwhile
