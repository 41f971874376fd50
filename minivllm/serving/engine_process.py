"""The client of an engine in another process. Stands for `MPClient` of vllm/v1/engine/core_client.py (v0.22.1).

Event loops and engine then have a GIL each, so what a server does for its clients does not delay the steps.
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
from minivllm.errors import EngineDeadError, died_of
from minivllm.lora.request import LoRARequest
from minivllm.processes import end_process, how_it_ended, packed, receive, send, start_process
from minivllm.progress import Listener
from minivllm.serving.adapter_reader import PARALLEL_READS
from minivllm.serving.batching import call_at_end_of_iteration
from minivllm.serving.calls import CALLS, Function, Subscribe, name_of
from minivllm.serving.client import SECONDS_TO_STOP, SHUT_DOWN, EngineCoreRequest
from minivllm.serving.streams import Sink, wake
from minivllm.serving.wire import OutputDelta, OutputReader, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOST = "minivllm.serving.engine_host"


class EngineProcess:
    """An `EngineClient` of an engine that another process makes and steps (`EngineHost`).

    make_engine      is pickled by its name, with its arguments; what it raises there is raised here
    more_calls       functions that `call` takes in addition to `CALLS`, pickled likewise
    parallel_reads   adapters that are read from disk concurrently with steps
    on_progress      is called with the progress of making the engine; None = that process shows a bar

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
        self._known_calls = {name_of(function) for function in (*CALLS, *more_calls)}
        self._lock = threading.Lock()  # held while a message is sent
        self._begun: deque[Request] = deque()  # are sent with the next message
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
                    if kind == "not_made":
                        raise value
                    getattr(self, f"on_{kind}")(number, value)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._how_it_ended() from None

    # ---- called from any thread -----------------------------------------------------------------------------

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """As in `EngineClient`. The function is sent by its name, arguments and result are pickled.

        ValueError for a function that is neither in `CALLS` nor in `more_calls`.
        """
        return self._request("call", self._checked_name(function), *args)

    def begin(self, sink: Sink, request: EngineCoreRequest) -> None:
        """As in `EngineClient`. Requests of one iteration of the event loop are sent as one message."""
        number = next(self._numbers)
        self._requests[number] = sink, OutputReader(request.request_id)
        self._post(number, "begin", *request, at_once=False)

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> "Future[None]":
        """As in `EngineClient`."""
        own = None
        if sink is not None:
            own = next((i for i, (each, _) in list(self._requests.items()) if each is sink), -1)
        return self._request("abort", list(request_ids), own)

    def read_ahead(self, lora_request: LoRARequest) -> "Future[None]":
        """As in `EngineClient`; it is done when the adapter has been read or cannot be."""
        return self._request("read_ahead", lora_request)

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """As in `EngineClient`."""
        self._post(next(self._numbers), "end_ahead", lora_request)

    def subscribe(self, events: Subscribe, listener: Callable[[Any], object]) -> "Future[None]":
        """As in `EngineClient`; the listener is called in the thread that receives. ValueError as in `call`."""
        name, number = self._checked_name(events), next(self._numbers)
        self._listeners[number] = listener
        return self._request("subscribe", name, number)

    def unsubscribe(self, listener: Callable[[Any], object]) -> "Future[None]":
        """As in `EngineClient`."""
        number = next((i for i, each in list(self._listeners.items()) if each is listener), -1)
        self._listeners.pop(number, None)
        return self._request("unsubscribe", number)

    def stop(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the process after its current step. Requests that have not finished get an EngineDeadError.

        timeout   seconds until the process is killed; 0 is at once
        """
        self._is_stopping = True
        if timeout:
            self._send(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self._process.kill()
                self._thread.join()

    def _checked_name(self, function: Function) -> str:
        if (name := name_of(function)) not in self._known_calls:
            raise ValueError(
                f"'{name}' is not a call that an engine in another process takes; add it to more_calls"
            )
        return name

    def _request(self, method: str, *args: Any) -> Future:
        """Have a method of `EngineHost` called; its reply."""
        number, future = next(self._numbers), Future()
        self._calls[number] = future
        future.add_done_callback(lambda future: future.cancelled() and self._cancel(number))
        self._post(number, method, *args)
        return future

    def _cancel(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._send((number, "cancel", packed(())))

    def _post(self, number: int, method: str, *args: Any, at_once: bool = True) -> None:
        try:
            request = number, method, packed(args)
            if at_once:
                self._send(request)
            else:
                self._begun.append(request)
                call_at_end_of_iteration(self._send)
        except Exception as error:  # of any kind: arguments that cannot be pickled
            self._fail(number, error)
        if self.error is not None:  # the process may have ended before the number was registered
            self._fail(number, self.error)

    def _send(self, *requests: Request | None) -> None:
        """Send the requests that have begun, and then these, as one message. None ends the process."""
        # If the process has ended, the receiving thread fails all requests.
        with self._lock, suppress(OSError):
            begun = [self._begun.popleft() for _ in range(len(self._begun))]
            if message := [*begun, *requests]:
                send(self._pipe, message)

    def _fail(self, number: int, error: Exception) -> None:
        """End a call or a request with an error."""
        if (future := self._calls.pop(number, None)) is not None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        elif (request := self._requests.pop(number, None)) is not None and request[0].put(error):
            wake([request[0]])

    # ---- in the thread that receives ------------------------------------------------------------------------

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while self.error is None:
                for kind, number, value in receive(self._pipe):
                    getattr(self, f"on_{kind}")(number, value)
                self._wake()
        except (EOFError, OSError):
            pass  # the process has ended
        except BaseException as cause:  # of any kind, because all clients must get it
            logger.error("a message of the engine's process could not be read", exc_info=cause)
            error = died_of(cause)
        self._end(error or self.error or self._how_it_ended())

    def _end(self, error: Exception) -> None:
        self.error = EngineDeadError(SHUT_DOWN) if self._is_stopping else error
        for number in [*self._calls, *self._requests]:
            self._fail(number, self.error)
        self._kill()

    def _how_it_ended(self) -> EngineDeadError:
        how = how_it_ended(self._process, SECONDS_TO_STOP)
        return EngineDeadError(f"the engine's process has ended ({how}); start another one")

    def _kill(self) -> None:
        """Close the pipe and end the process; one that is stopping has some seconds."""
        with self._lock:
            self._pipe.close()
        end_process(self._process, SECONDS_TO_STOP if self._is_stopping else 0.5)

    def _wake(self) -> None:
        due, self._due = self._due, []
        if lost := wake(due):  # their event loops are closed
            # Not in this thread, which would not receive while it blocks in a send: the engine may block in one, too.
            threading.Thread(target=self._abort_all, args=(lost,), name="minivllm-abort", daemon=True).start()

    def _abort_all(self, sinks: list[Sink]) -> None:
        for number, (sink, reader) in list(self._requests.items()):
            if sink in sinks and self._requests.pop(number, None) is not None:
                self._post(next(self._numbers), "abort", [reader.request_id], number)

    def on_output(self, number: int, delta: OutputDelta) -> None:
        if (request := self._requests.get(number)) is None:
            return
        sink, reader = request
        if delta.finished:
            del self._requests[number]
        if sink.put(reader.output(delta)):
            self._due.append(sink)

    def on_failure(self, number: int, error: Exception) -> None:
        self._fail(number, error)

    def on_reply(self, number: int, pickled: bytes) -> None:
        future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = pickle.loads(pickled)
        except Exception as error:  # of any kind: a result that cannot be unpickled
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
    """The loggers that have a level; the root logger's name is empty."""
    found = {name: logging.getLogger(name).level for name in list(logging.root.manager.loggerDict)}
    return {"": logging.root.level, **{name: level for name, level in found.items() if level}}
