"""The thread that steps an engine. Stands for `EngineCoreProc.run_busy_loop` of vllm/v1/engine/core.py (v0.22.1)."""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.faults import as_fault
from minivllm.serving.errors import EngineDeadError, died_of
from minivllm.serving.hand_over import HandOver
from minivllm.serving.streams import aborted, wake

logger = logging.getLogger(__name__)

T = TypeVar("T")

# So many steps in a row that raise end the engine. One is taken again, and then ends the requests that made it raise.
MOST_FAILED_STEPS = 3


class Sink(Protocol):
    """Where a request's outputs go, or the error that ends them: a `Stream`, or a queue of the standard library."""

    def put(self, item: RequestOutput | Exception) -> bool | None:
        """True: it has to be woken."""


class EngineThread:
    """An engine in a thread of its own, which nobody else calls.

    engine   as it is between two steps; other threads may read of it what one operation reads
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._hand_over: HandOver[LLMEngine] = HandOver()
        self._sinks: dict[str, Sink] = {}  # by the ids of requests that have not ended
        self._failed_steps = 0  # in a row
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        self._thread.start()

    @property
    def error(self) -> Exception | None:
        """What ended the engine."""
        return self._hand_over.error

    def call(self, function: Callable[[LLMEngine], T]) -> "Future[T]":
        """Run `function(engine)` between two steps (`HandOver.call`)."""
        return self._hand_over.call(function)

    def stop(self) -> None:
        """End the thread after the step that it is in. Requests that have not ended get an EngineDeadError."""
        self._stopping = True
        self.call(lambda engine: None)  # it may be waiting for a call
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- in the engine's thread -----------------------------------------------------------------------------

    def begin(self, sink: Sink, request_id: str, *args: Any, **options: Any) -> None:
        """Add a request whose outputs go to `sink`. Arguments and errors are those of `LLMEngine.add_request`."""
        self.engine.add_request(request_id, *args, **options)
        self._sinks[request_id] = sink

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """End a request, with a last output that says so; nothing if it has ended.

        sink   only if the request is this one's: another may have its id by now
        """
        found = self._sinks.get(request_id)
        if found is None or sink not in (None, found):
            return
        self.engine.abort_request(request_id)
        self._deliver([aborted(request_id, getattr(found, "last", None))])

    def _run(self) -> None:
        error: Exception = EngineDeadError("the engine was shut down; start another one")
        try:
            while not self._stopping:
                self._hand_over.run(self.engine, wait=not self._sinks)
                if self._sinks:
                    self._step()
            self.engine.abort_request(list(self._sinks))
        except BaseException as cause:  # whatever it is, whoever waits must hear of it
            logger.error("the engine has ended", exc_info=cause)
            error = died_of(cause)
        self._hand_over.end(error)
        wake([sink for sink in self._sinks.values() if sink.put(error)])
        self._sinks.clear()

    def _step(self) -> None:
        try:
            outputs = self.engine.step(of=self._sinks)
            self._failed_steps = 0
        except BaseException as error:
            as_fault(error)
            self._failed_steps += 1
            if self._failed_steps == MOST_FAILED_STEPS:
                raise
            logger.warning("a step raised an error, and is taken again", exc_info=error)
            return
        self._deliver(outputs)
        if self._sinks and not self.engine.has_unfinished_requests():
            self._deliver([aborted(i, None) for i in self._sinks])  # somebody aborted them behind our back

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        due = []
        for output in outputs:
            sink = self._sinks.pop(output.request_id) if output.finished else self._sinks[output.request_id]
            if sink.put(output):
                due.append(sink)
        lost = wake(due)
        for request_id in [i for i, sink in self._sinks.items() if sink in lost] if lost else ():
            del self._sinks[request_id]
            self.engine.abort_request(request_id)
