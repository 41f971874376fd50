"""An engine in a process of its own, seen from the one that asks it. Stands for `MPClient` of
vllm/v1/engine/core_client.py (v0.22.1).

Event loops and engine have a GIL each: what a server does for its clients takes nothing from the steps.
"""

import itertools
import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from minivllm.engine.llm_engine import LLMEngine
from minivllm.lora.request import LoRARequest
from minivllm.processes import end_process, how_it_ended, receive, send, start_process
from minivllm.progress import Listener
from minivllm.serving.adapter_reader import PARALLEL_READS
from minivllm.serving.calls import CALLS, Function, by_name, name_of
from minivllm.serving.client import SECONDS_TO_STOP
from minivllm.serving.engine_loop import Sink
from minivllm.serving.errors import EngineDeadError, died_of
from minivllm.serving.streams import wake
from minivllm.serving.turns import call_at_end_of_turn
from minivllm.serving.wire import Delta, Order, OutputReader, order

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOST = "minivllm.serving.engine_host"
SHUT_DOWN = "the engine was shut down; start another one"


class EngineProcess:
    """An `EngineClient` of an engine that another process makes and steps.

    make_engine      goes there by its name, with its arguments; what it raises is raised here
    more_calls       functions with a name that `call` takes there beside `CALLS`
    parallel_reads   adapters that are read from disk at the same time, beside the steps
    on_progress      is told how far the engine is while it is made; None = that process shows a bar

    EngineDeadError when that process ends while it makes the engine.
    """

    clock = staticmethod(time.monotonic)  # all processes of a machine have the same

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        parallel_reads: int = PARALLEL_READS,
        on_progress: Listener | None = None,
        more_calls: Collection[Function] = (),
    ) -> None:
        self.error: Exception | None = None
        self.adapter_names: Collection[str] = ()
        self._numbers = itertools.count()
        self._requests: dict[int, tuple[Sink, OutputReader]] = {}
        self._calls: dict[int, Future] = {}
        self._listeners: dict[int, Callable[[Any], object]] = {}
        self._due: list[Sink] = []  # have outputs of the message that is read
        self._is_stopping = False
        self._progress = on_progress
        self._known = by_name((*CALLS, *more_calls))
        self._lock = threading.Lock()  # held while a message is sent
        self._begun: deque[Order] = deque()  # requests that go with the next message
        self._pipe, self._process = start_process(HOST)
        try:
            self.config, self.tokenizer = self._load(make_engine, parallel_reads, more_calls)
        except BaseException:
            self._kill()
            raise
        self._thread = threading.Thread(target=self._run, name="minivllm-receiver", daemon=True)
        self._thread.start()

    def _load(self, make_engine: Callable[[], LLMEngine], *options: Any) -> tuple[Any, Any]:
        try:
            send(self._pipe, (make_engine, *options, levels_of_loggers(), self._progress is not None))
            while True:
                for kind, number, value in receive(self._pipe):
                    if kind == "start":
                        return value
                    if kind == "failure":
                        raise value
                    getattr(self, f"on_{kind}")(number, value)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._how_it_ended() from None

    # ---- from any thread ------------------------------------------------------------------------------------

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """The result of `function(engine, *args)`. The function goes by its name, arguments and result are copied.

        ValueError for one that is neither in `CALLS` nor in `more_calls`.
        """
        if (name := name_of(function)) not in self._known:
            raise ValueError(
                f"'{name}' is not a call that an engine in another process takes; add it to more_calls"
            )
        return self._ask("call", name, *args)

    def begin(self, sink: Sink, request_id: str, *args: Any, **options: Any) -> None:
        """Add a request. Its outputs go to `sink`, and so does what `LLMEngine.add_request` raises."""
        number = next(self._numbers)
        self._requests[number] = sink, OutputReader(request_id)
        self._post(number, "begin", (request_id, *args), options, at_once=False)

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> "Future[None]":
        """End requests, each with a last output that says so.   sink: only those that are this one's"""
        own = None
        if sink is not None:
            own = next((i for i, (each, _) in list(self._requests.items()) if each is sink), -1)
        return self._ask("abort", list(request_ids), own)

    def read_ahead(self, lora_request: LoRARequest) -> "Future[None]":
        """Have an adapter read that somebody is about to load; done when it has been read, or cannot be."""
        return self._ask("read_ahead", lora_request)

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """It is loaded by now, or nobody is about to load it any more."""
        self._post(next(self._numbers), "end_ahead", lora_request)

    def watch_steps(self, listener: Callable[[Any], object]) -> "Future[None]":
        """Tell a listener of every step from now on, in the thread that hears from the engine."""
        return self._ask("watch_steps", self._listen(listener))

    def unwatch_steps(self, listener: Callable[[Any], object]) -> "Future[None]":
        """It is told no more; one that never was is passed over."""
        number = next((i for i, each in list(self._listeners.items()) if each is listener), -1)
        self._listeners.pop(number, None)
        return self._ask("unwatch_steps", number)

    def watch_adapters(self, listener: Callable[[Any], object]) -> "Future[None]":
        """Tell a listener of what happens to adapters from now on, in the thread that hears from the engine."""
        return self._ask("watch_adapters", self._listen(listener))

    def stop(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the process after the step that it is in. Requests that have not ended get an EngineDeadError.

        timeout   seconds for that step: then the process is killed; 0 is at once
        """
        self._is_stopping = True
        if timeout:
            self._send(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self._process.kill()
                self._thread.join()

    def _listen(self, listener: Callable[[Any], object]) -> int:
        number = next(self._numbers)
        self._listeners[number] = listener
        return number

    def _ask(self, name: str, *args: Any) -> Future:
        number, future = next(self._numbers), Future()
        self._calls[number] = future
        future.add_done_callback(lambda future: future.cancelled() and self._cancel(number))
        self._post(number, name, *args)
        return future

    def _cancel(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._send(order(number, "cancel", ()))

    def _post(self, number: int, name: str, *args: Any, at_once: bool = True) -> None:
        try:
            posted = order(number, name, args)
            if at_once:
                self._send(posted)
            else:
                self._begun.append(posted)
                call_at_end_of_turn(self._send)
        except Exception as error:  # arguments can be anything: it cannot be copied
            self._refuse(number, error)
        if self.error is not None:  # the end may have come before this was noted
            self._refuse(number, self.error)

    def _send(self, *orders: Order | None) -> None:
        """What has begun, and then these. None ends the process."""
        # Without anybody at the other end, the receiving thread tells everybody.
        with self._lock, suppress(OSError):
            begun = [self._begun.popleft() for _ in range(len(self._begun))]
            if message := [*begun, *orders]:
                send(self._pipe, message)

    def _refuse(self, number: int, error: Exception) -> None:
        """Whoever waits for this number gets the error."""
        if (future := self._calls.pop(number, None)) is not None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        elif (request := self._requests.pop(number, None)) is not None and request[0].put(error):
            wake([request[0]])

    # ---- in the thread that hears from the engine ------------------------------------------------------------

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while self.error is None:
                for kind, number, value in receive(self._pipe):
                    getattr(self, f"on_{kind}")(number, value)
                self._wake()
        except (EOFError, OSError):
            pass  # the process has ended
        except BaseException as cause:  # whatever it is, whoever waits must hear of it
            logger.error("what the engine said could not be read", exc_info=cause)
            error = died_of(cause)
        self._end(error or self.error or self._how_it_ended())

    def _end(self, error: Exception) -> None:
        self.error = EngineDeadError(SHUT_DOWN) if self._is_stopping else error
        for number in [*self._calls, *self._requests]:
            self._refuse(number, self.error)
        self._kill()

    def _how_it_ended(self) -> EngineDeadError:
        how = how_it_ended(self._process, SECONDS_TO_STOP)
        return EngineDeadError(f"the engine's process has ended ({how}); start another one")

    def _kill(self) -> None:
        """Nothing is left of the process. One that was told to stop has its time."""
        with self._lock:
            self._pipe.close()
        end_process(self._process, SECONDS_TO_STOP if self._is_stopping else 0.5)

    def _wake(self) -> None:
        due, self._due = self._due, []
        if lost := wake(due):  # their event loops are closed
            # Not in this thread: while it waits to send, nobody reads, and the engine may be waiting to send, too.
            threading.Thread(target=self._abort_all, args=(lost,), name="minivllm-abort", daemon=True).start()

    def _abort_all(self, sinks: list[Sink]) -> None:
        for number, (sink, reader) in list(self._requests.items()):
            if sink in sinks and self._requests.pop(number, None) is not None:
                self._post(next(self._numbers), "abort", [reader.request_id], number)

    def on_output(self, number: int, delta: Delta) -> None:
        if (request := self._requests.get(number)) is None:
            return
        sink, reader = request
        if delta.finished:
            del self._requests[number]
        if sink.put(reader.output(delta)):
            self._due.append(sink)

    def on_refusal(self, number: int, error: Exception) -> None:
        self._refuse(number, error)

    def on_reply(self, number: int, pickled: bytes) -> None:
        future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = pickle.loads(pickled)
        except Exception as error:  # a result can be anything
            future.set_exception(error)
        else:
            future.set_result(result)

    def on_event(self, number: int, event: Any) -> None:
        if (listener := self._listeners.get(number)) is not None:
            listener(event)

    def on_names(self, number: None, names: list[str]) -> None:
        self.adapter_names = frozenset(names)

    def on_progress(self, number: None, progress: tuple[str, int, int]) -> None:
        self._progress(*progress)

    def on_log(self, number: None, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)

    def on_death(self, number: None, error: Exception) -> None:
        self.error = error


def levels_of_loggers() -> dict[str, int]:
    """Of those that have one; the root logger's name is empty."""
    found = {name: logging.getLogger(name).level for name in list(logging.root.manager.loggerDict)}
    return {"": logging.root.level, **{name: level for name, level in found.items() if level}}
