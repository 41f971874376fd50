"""The processes that share a model with this one, as the first of them sees them.

Stands for `MultiprocExecutor` of vllm/v1/executor/multiproc_executor.py (v0.22.1).
"""

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from minivllm.errors import EngineDeadError, message_of, one_sentence
from minivllm.processes import end_process, how_it_ended, packed, receive, send, start_process

RANK_PROCESS = "minivllm.parallel.rank_process"
# When an error breaks a step here, so long it may take to hear that another rank's end was the cause.
SECONDS_TO_HEAR = 2.0
# The first to tell of its end may have been broken off by another's.
SECONDS_TO_BLAME = 0.2
# For a process that is asked to stop; then it is killed.
SECONDS_TO_STOP = 3.0
# A process that a signal has stopped (SIGSTOP) may be continued. After so long it has ended for all others, who wait.
SECONDS_STOPPED = 30.0
SECONDS_BETWEEN_LOOKS = 1.0
ENDING = "minivllm-ranks-end"  # the name of the threads in which `on_death` is called


class OtherRanks:
    """Ranks 1 to N - 1: they do what rank 0 tells them, in its order, until the pipe to it is closed.

    pipes       to each of them, by rank
    processes   that were started here; none where somebody else has (torchrun)

    error       why there are too few of them; then nothing more can be computed
    on_death    called once, when one has ended, in a thread of its own; before anybody hears of `error`
    """

    def __init__(self, pipes: Sequence[Connection], processes: Sequence[subprocess.Popen] = ()) -> None:
        self.pipes = list(pipes)
        self.processes = list(processes)
        self.error: EngineDeadError | None = None
        self.on_death: list[Callable[[], object]] = []
        self._size = len(self.pipes) + 1
        self._is_closing = False
        self._has_died = threading.Event()
        self._lock = threading.Lock()  # held while a message is sent
        self._answers: dict[int, tuple[dict[int, str | None], Future]] = {}
        self._thread = threading.Thread(target=self._listen, name="minivllm-ranks", daemon=True)

    @classmethod
    def start(cls, number: int) -> "OtherRanks":
        """Start so many processes."""
        started = [start_process(RANK_PROCESS) for _ in range(number)]
        return cls([pipe for pipe, _ in started], [process for _, process in started])

    def begin(self, messages: Sequence[tuple]) -> None:
        """Give each its first message, and wait until all are ready. EngineDeadError if one ends before."""
        ready = self._expect(0)
        self._thread.start()
        for pipe, message in zip(self.pipes, messages):
            with suppress(OSError):
                send(pipe, message)
        ready.result()

    # ---- messages to them -----------------------------------------------------------------------------------

    def tell(self, name: str, *args: Any) -> None:
        """Have all of them call a method of `Follower`. EngineDeadError when one has ended."""
        message = packed((name, args))
        with self._lock:
            self.check()
            for pipe in self.pipes:
                with suppress(OSError):  # it has ended: the listening thread tells everybody
                    pipe.send_bytes(message)

    def ask(self, number: int, name: str, *args: Any) -> "Future[dict[int, str]]":
        """As `tell`, with an answer: rank -> what was wrong there. number: the first argument, never used before"""
        answer = self._expect(number)
        self.tell(name, number, *args)
        return answer

    def _expect(self, number: int) -> Future:
        future: Future = Future()
        self._answers[number] = {}, future
        if self.error is not None:  # the end may have come before this was noted
            self._end_answers()
        return future

    def check(self) -> None:
        """EngineDeadError when one has ended."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def in_step(self, is_under_way: Callable[[], bool]) -> Iterator[None]:
        """Around what all ranks do together: an error here ends the engine.

        is_under_way   whether the others have begun. Before, an error is raised as it is, unless it is theirs
        """
        try:
            yield
        except BaseException as error:
            if not is_under_way() and not is_of_others(error):
                raise
            self._has_died.wait(SECONDS_TO_HEAR)
            self._die(0, message_of(error))
            raise self.error from error
        self.check()

    # ---- messages from them ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        failed: dict[int, tuple[bool, str]] = {}
        looks: Counter[int] = Counter()
        while not self._is_closing and self.error is None:
            telling = wait(self.pipes, SECONDS_BETWEEN_LOOKS)
            if not telling:
                self._look_for_the_stopped(looks)
            for pipe in telling:
                rank = self.pipes.index(pipe) + 1
                try:
                    name, value = receive(pipe)
                except (EOFError, OSError):
                    self._look_for_the_first(rank, failed)
                    return
                if name == "failed":
                    failed[rank] = value
                else:
                    self._note(rank, *value)

    def _look_for_the_stopped(self, looks: Counter[int]) -> None:
        """looks: rank -> how often in a row it was found stopped. No time: this process may have been stopped, too"""
        for rank, process in enumerate(self.processes, start=1):
            looks[rank] = looks[rank] + 1 if is_stopped(process.pid) else 0
            if looks[rank] * SECONDS_BETWEEN_LOOKS >= SECONDS_STOPPED:
                process.kill()  # and so whoever waits to tell it something, and holds the lock
                self._die(rank, f"stopped by a signal and not continued for {SECONDS_STOPPED:g} s")
                return

    def _note(self, rank: int, number: int, said: str | None) -> None:
        """A rank's answer. Once all have answered, whoever asked gets those that say something."""
        answers, future = self._answers[number]
        answers[rank] = said
        if len(answers) == len(self.pipes):
            del self._answers[number]
            if future.set_running_or_notify_cancel():
                future.set_result({rank: said for rank, said in answers.items() if said is not None})

    def _look_for_the_first(self, ended: int, failed: dict[int, tuple[bool, str]]) -> None:
        """Of several that end one after another, the first without a word was killed; others' ends follow from it.

        failed   rank -> whether its error came from a collective, and its error
        """
        if self._is_closing:
            return
        time.sleep(SECONDS_TO_BLAME)
        for rank, pipe in enumerate(self.pipes, start=1):
            with suppress(EOFError, OSError):
                while rank not in failed and pipe.poll():
                    name, value = receive(pipe)
                    if name == "failed":
                        failed[rank] = value
        failed.setdefault(ended, (False, self._how_it_ended(ended)))
        silent = [rank for rank, process in enumerate(self.processes, start=1) if process.poll() is not None]
        for rank in silent:
            failed.setdefault(rank, (False, self._how_it_ended(rank)))
        first = min(failed, key=lambda rank: (failed[rank][0], rank != ended))
        self._die(first, failed[first][1])

    def _how_it_ended(self, rank: int) -> str:
        return (
            how_it_ended(self.processes[rank - 1], SECONDS_TO_STOP)
            if self.processes
            else "its process has ended"
        )

    def _die(self, rank: int, how: str) -> None:
        """Nothing more can be computed: end the others, and whoever waits for them."""
        with self._lock:
            if self.error is not None:
                return
            text = (
                f"rank {rank} of {self._size} has ended ({how}), and the engine with it; start another engine"
            )
            self.error = EngineDeadError(one_sentence(text))
        self._kill()
        for end in self.on_death:
            threading.Thread(target=end, name=ENDING, daemon=True).start()
        self._end_answers()
        self._has_died.set()

    def _end_answers(self) -> None:
        for number in list(self._answers):
            _, future = self._answers.pop(number)
            if future.set_running_or_notify_cancel():
                future.set_exception(self.error)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """End them once they have done what they were asked to; one that takes too long is killed."""
        self._is_closing = True
        until = time.monotonic() + SECONDS_TO_STOP
        with suppress(EngineDeadError):
            self.tell("stop")
        for process in self.processes:
            end_process(process, until - time.monotonic())
        for pipe in self.pipes:
            pipe.close()


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a child of this process. In the hands of a debugger it is not; nor on some macOS."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):  # it has ended
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def is_of_others(error: BaseException) -> bool:
    """Whether a collective raised it: some other rank has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def wait_for_ends() -> None:
    """Until the engines that ended with one of their ranks have done `on_death`, a few seconds at most."""
    for thread in threading.enumerate():
        if thread.name == ENDING:
            thread.join(SECONDS_TO_STOP)
