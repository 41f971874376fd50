"""Who may call an engine, and what a call that broke off has left. Stands for nothing in vLLM (v0.22.1).

vLLM keeps its engine in a process of its own, fed by a queue. There a Ctrl-C never comes between two lines of a step.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any

from minivllm.errors import REFUSALS, is_refusal, raise_in_one_sentence

IN_THE_MIDDLE = (
    "this {} was called in the middle of another call, by a signal handler, say; "
    "have the handler set a flag, and call it when the other call has returned"
)


class Turns:
    """Calls of one object by one thread at a time, each of which begins with a whole state.

    what    what is called, for the error
    mend    makes the state whole again after a call that broke off

    torn    a call is under way, or one broke off and may have done half its work
    """

    def __init__(self, what: str, mend: Callable[[], None] = lambda: None) -> None:
        self.what = what
        self.mend = mend
        self.torn = False
        # "now" -> the call under way: its thread and function.
        self._calls: dict[str, tuple[int, FrameType]] = {}

    @contextmanager
    def take(self, errors_leave_it_whole: bool = True) -> Iterator[None]:
        """Around a call that changes the state. RuntimeError when another thread, or this one, is in one.

        errors_leave_it_whole   the call raises a refusal (`is_refusal`) only before it has changed anything. If False,
                                the next call mends the state, unless the one that raised has cleared `torn`

        Ctrl-C, or a lack of memory, may come between any two lines. After it the next call mends the state first.
        """
        me = threading.get_ident(), sys._getframe(2)  # past contextlib's: the function that says `with`
        # setdefault is one operation, which no other thread can come between.
        while (other := self._calls.setdefault("now", me)) is not me:
            if _is_under_way(*other):
                raise RuntimeError(self._refusal(is_another_thread=other[0] != me[0]))
            if self._calls.get("now") is other:
                self._calls.pop("now", None)  # left by a call that a Ctrl-C ended at once
        try:
            if self.torn:
                self.mend()  # what this raises leaves it torn
            self.torn = True
            try:
                yield
            except Exception as error:
                if errors_leave_it_whole and is_refusal(error):
                    self.torn = False
                raise
            self.torn = False
        finally:
            self._calls.clear()

    def _refusal(self, is_another_thread: bool) -> str:
        if is_another_thread:
            return (
                f"another thread is in a call of this {self.what}, which serves one thread at a time; "
                "call an LLM or an AsyncLLM from several, or hand one thread the others' requests through a queue.Queue"
            )
        return IN_THE_MIDDLE.format(self.what)


def in_turn(on_threads: bool = False, refuses: bool = True) -> Callable[[Callable], Callable]:
    """Decorates a method of an engine: a call takes its turn (`Turns.take`), and refuses in one sentence.

    on_threads   it computes, on as many CPU threads as a step does
    refuses      it may refuse what it is asked. If False, any error has come in the middle of a change
    """

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            try:
                with (
                    self._turns.take(refuses),
                    self.runner.cpu_threads.in_use() if on_threads else nullcontext(),
                ):
                    return method(self, *args, **options)
            except REFUSALS as error:
                raise_in_one_sentence(error)

        return call

    return decorate


def _is_under_way(thread: int, function: FrameType) -> bool:
    """Whether a thread is in that function now."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not function:
        frame = frame.f_back
    return frame is not None


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C waits; for clearing up after one, which a second one must not break off."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen and callable(before):
            before(seen[0], None)
