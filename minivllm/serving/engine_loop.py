"""Steps of an engine, and calls of others between them. Stands for `EngineCoreProc.run_busy_loop` of
vllm/v1/engine/core.py (v0.22.1)."""

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.faults import as_fault
from minivllm.serving.hand_over import HandOver
from minivllm.serving.streams import aborted, wake

logger = logging.getLogger(__name__)

T = TypeVar("T")

# So many steps in a row that raise are given up. One is taken again, and then ends the requests that made it raise.
MOST_FAILED_STEPS = 3


class Sink(Protocol):
    """Where a request's outputs go, or the error that ends them: a `Stream`, or a queue of the standard library."""

    def put(self, item: RequestOutput | Exception) -> bool | None:
        """True: it has to be woken."""


class EngineLoop:
    """What the thread that has an engine does, again and again.

    engine   other threads may read of it what one operation reads
    sinks    request id -> where its outputs go, until its last one
    is_held_up   whether something comes that will end in a call, so that after a step that did nothing none need be
                 taken before that
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.hand_over: HandOver[LLMEngine] = HandOver()
        self.sinks: dict[str, Sink] = {}
        self.is_held_up: Callable[[], bool] = lambda: False
        self._failed_steps = 0  # in a row
        self._did_nothing = False  # the last step

    @property
    def is_idle(self) -> bool:
        return not self.sinks and not self.hand_over.waits

    def call(self, function: Callable[[LLMEngine], T]) -> "Future[T]":
        """From any thread: run `function(engine)` between two steps (`HandOver.call`)."""
        return self.hand_over.call(function)

    # ---- in the engine's thread -----------------------------------------------------------------------------

    def turn(self, wait: bool = False) -> None:
        """Run the calls there are, and take a step if somebody waits for one.

        wait   for a call, if there is nothing to do

        Raises what is no fault, and what raises again and again.
        """
        nothing_to_do = not self.sinks or (self._did_nothing and self.is_held_up())
        self.hand_over.run(self.engine, wait=wait and nothing_to_do)
        if self.sinks:
            self._step()

    def begin(self, sink: Sink, request_id: str, *args: Any, **options: Any) -> None:
        """Add a request whose outputs go to `sink`. Arguments and errors are those of `LLMEngine.add_request`."""
        self.engine.add_request(request_id, *args, **options)
        self.sinks[request_id] = sink

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> None:
        """End requests, each with a last output that says so; nothing is done for those that have ended.

        sink   only those that are this one's: another may have their ids by now
        """
        found = {i: self.sinks[i] for i in request_ids if i in self.sinks}
        found = {i: own for i, own in found.items() if sink in (None, own)}
        self.engine.abort_request(list(found))
        self._deliver([aborted(i, getattr(own, "last", None)) for i, own in found.items()])

    def fail(self, error: Exception) -> None:
        """Whoever waits for outputs gets this error. The engine keeps the requests."""
        sinks, self.sinks = self.sinks, {}
        wake([sink for sink in sinks.values() if sink.put(error)])

    def _step(self) -> None:
        steps = self.engine.metrics.steps
        try:
            outputs = self.engine.step(of=self.sinks)
            self._failed_steps = 0
        except BaseException as error:
            as_fault(error)
            self._failed_steps += 1
            if self._failed_steps == MOST_FAILED_STEPS:
                raise
            logger.warning("a step raised an error, and is taken again", exc_info=error)
            return
        self._did_nothing = not outputs and steps == self.engine.metrics.steps
        self._deliver(outputs)
        if self.sinks and not self.engine.has_unfinished_requests():
            self._deliver([aborted(i, None) for i in self.sinks])  # somebody aborted them behind our back

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        due = []
        for output in outputs:
            sink = self.sinks.pop(output.request_id) if output.finished else self.sinks[output.request_id]
            if sink.put(output):
                due.append(sink)
        if lost := wake(due):
            gone = [request_id for request_id, sink in self.sinks.items() if sink in lost]
            for request_id in gone:
                del self.sinks[request_id]
            self.engine.abort_request(gone)
