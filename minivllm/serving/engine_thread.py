"""An engine in a thread of its own: between two steps it runs the calls of others, after each it delivers the outputs.

Stands for `EngineCoreProc` of vllm/v1/engine/core.py (v0.22.1), which is a process, and its `run_busy_loop`.

The thread of `LLM` (`engine/llm_thread.py`) is simpler because its callers block: they take outputs step by step,
and an error that `LLMEngine.step` raises ends their requests alone. Here callers are event loops, which must not
block. So a call returns a future, and is refused once the thread has ended; one call wakes an event loop for all of
its requests, on a GPU while the next step computes; and such an error ends the engine. What both share is a queue of
functions and futures, a dozen lines.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import EngineDeadError, died_of, id_in_use
from minivllm.lora.request import LoRARequest
from minivllm.serving.adapter_reader import PARALLEL_READS, AdapterReader
from minivllm.serving.call_queue import CallQueue
from minivllm.serving.calls import Subscribe
from minivllm.serving.client import SECONDS_TO_STOP, SHUT_DOWN, EngineCoreRequest
from minivllm.serving.streams import Sink, aborted, wake

logger = logging.getLogger(__name__)

T = TypeVar("T")

# An idle engine on a GPU waits for requests right behind the first one: so long for the next one, and for all.
SECONDS_TO_NEXT, SECONDS_FOR_ALL = 0.001, 0.01


class EngineThread:
    """An `EngineClient` whose engine is stepped by a thread of this process until it is stopped or an error ends it.

    engine           other threads may read of it what one operation reads
    parallel_reads   adapters that are read from disk concurrently with steps
    on_wake          is called in the engine's thread whenever consumers are woken
    on_end           is called in the engine's thread with the error that ends it, before any client gets it
    start            False: start no thread; `run_once` is called by hand
    sinks            request id -> where its outputs go, until its last one
    """

    def __init__(
        self,
        engine: LLMEngine,
        parallel_reads: int = PARALLEL_READS,
        *,
        on_wake: Callable[[], object] = lambda: None,
        on_end: Callable[[Exception], object] = lambda error: None,
        start: bool = True,
    ) -> None:
        self.engine, self._on_wake, self._on_end = engine, on_wake, on_end
        self.config, self.tokenizer, self.clock = engine.config, engine.tokenizer, engine.clock
        self.call_queue: CallQueue[LLMEngine] = CallQueue()
        self.sinks: dict[str, Sink] = {}
        self.reader = None
        if engine.adapters is not None:
            self.reader = AdapterReader(engine, parallel_reads, lambda: self.call(lambda engine: None))
        self._checking: dict[str, Sink] = {}  # requests whose adapters are being checked
        self._unsubscribe: dict[Callable, Callable[[], object]] = {}  # by listener
        self._did_nothing = False  # the last step
        self._due: list[Sink] = []  # have outputs, and are not woken yet
        self._lost: list[Sink] = []  # could not be woken: their event loop is closed
        # While a GPU computes, this thread waits without the GIL: a good time for others to send what they have.
        self._on_gpu = engine.runner.on_gpu
        if self._on_gpu:
            engine.listeners.append(lambda scheduled: self._wake())
        # When a rank dies the engine ends at once, also between steps.
        engine.executor.on_death(lambda check: self.call(lambda engine: check()))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        if start:
            self._thread.start()

    # ---- called from any thread -----------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """What ended the engine."""
        return self.call_queue.error

    @property
    def adapter_names(self) -> Collection[str]:
        """Names of the adapters that the engine knows."""
        return () if self.engine.adapters is None else self.engine.adapters.by_name

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """As in `EngineClient`; of a function of any kind (`CallQueue.call`)."""
        return self.call_queue.call(lambda engine: function(engine, *args))

    def begin(self, sink: Sink, request: EngineCoreRequest) -> None:
        """As in `EngineClient`. An adapter that the engine does not know is checked first, concurrently with steps."""
        self._call_for(sink, self._check_and_add, request)

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> "Future[None]":
        """As in `EngineClient`."""
        return self.call(self._abort, list(request_ids), sink)

    def read_ahead(self, lora_request: LoRARequest) -> "Future[Future[None] | None]":
        """As in `EngineClient`."""
        return self.call(lambda engine: self.reader and self.reader.begin_ahead(lora_request))

    def end_ahead(self, lora_request: LoRARequest) -> None:
        """As in `EngineClient`."""
        if self.reader is not None:
            self.call(lambda engine: self.reader.end_ahead(lora_request))

    def subscribe(self, events: Subscribe, listener: Callable[[Any], object]) -> "Future[None]":
        """As in `EngineClient`; the listener is called in the engine's thread."""

        def register(engine: LLMEngine) -> None:
            self._unsubscribe[listener] = events(engine, listener)

        return self.call(register)

    def unsubscribe(self, listener: Callable[[Any], object]) -> "Future[None]":
        """As in `EngineClient`."""
        return self.call(lambda engine: self._unsubscribe.pop(listener, lambda: None)())

    def stop(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the thread after its current step, however long that takes. Requests that have not finished get an
        EngineDeadError."""
        self._stopping = True
        self.call(lambda engine: None)  # it may be waiting for a call
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if self.reader is not None:
                self.reader.close()

    # ---- in the engine's thread: requests -------------------------------------------------------------------

    def _call_for(self, sink: Sink, function: Callable[..., object], *args: Any) -> None:
        """Call `function(engine, sink, *args)`; an error that it raises is put into the sink."""
        self.call(function, sink, *args).add_done_callback(partial(_put_error, sink))

    def _check_and_add(self, engine: LLMEngine, sink: Sink, request: EngineCoreRequest) -> None:
        request_id, lora_request = request.request_id, request.lora_request
        # The engine refuses an id that is no text.
        if isinstance(request_id, str) and request_id in self._checking:
            raise id_in_use(request_id)
        check = None
        if self.reader is not None and isinstance(request_id, str) and isinstance(lora_request, LoRARequest):
            if lora_request.is_made_of_others:
                request = request._replace(lora_request=engine.adapters.compose(lora_request))
            check = self.reader.check_ahead(request.lora_request)
        if check is None:
            self._add(engine, sink, request)
            return
        self._checking[request_id] = sink
        check.add_done_callback(lambda check: self._call_for(sink, self._add_checked, request, check))

    def _add_checked(self, engine: LLMEngine, sink: Sink, request: EngineCoreRequest, check: Future) -> None:
        if self._checking.get(request.request_id) is sink:  # else it was aborted
            del self._checking[request.request_id]
            with self.reader.with_check(request.lora_request, check):
                self._add(engine, sink, request)

    def _add(self, engine: LLMEngine, sink: Sink, request: EngineCoreRequest) -> None:
        engine.add_request(*request)
        self.sinks[request.request_id] = sink

    def _abort(self, engine: LLMEngine, request_ids: list[str], sink: Sink | None) -> None:
        for request_id in request_ids:
            waiting = self._checking.get(request_id)
            if waiting is not None and sink in (None, waiting):
                del self._checking[request_id]
                if waiting.put(aborted(request_id, None)):
                    wake([waiting])
        found = {i: self.sinks[i] for i in request_ids if i in self.sinks}
        found = {i: own for i, own in found.items() if sink in (None, own)}
        engine.abort_request(list(found))
        self._deliver([aborted(i, getattr(own, "last", None)) for i, own in found.items()])

    # ---- in the engine's thread: the loop -------------------------------------------------------------------

    def _run(self) -> None:
        error: Exception = EngineDeadError(SHUT_DOWN)
        try:
            while not self._stopping:
                self.run_once(wait=True)
            self.engine.abort_request(list(self.sinks))
        except BaseException as cause:  # of any kind, because all clients must get it
            logger.error("the engine has ended", exc_info=cause)
            error = died_of(cause)
        self._end(error)

    def run_once(self, wait: bool = False) -> None:
        """Run the calls in the queue, and take a step if there are requests. Raises what ends the engine.

        wait   for a call, if there is nothing to do
        """
        # After a step that did nothing because adapters are being read, the end of a read is a call.
        is_reading = self.reader is not None and self.reader.is_reading
        nothing_to_do = not self.sinks or (self._did_nothing and is_reading)
        if nothing_to_do or not self.call_queue.is_empty:
            self._wake()
        was_idle = not self.sinks
        self.call_queue.run(self.engine, wait=wait and nothing_to_do)
        if was_idle and self.sinks and self._on_gpu:
            self._gather_requests()
        if self.sinks:
            self._step()

    def _gather_requests(self) -> None:
        """Wait for concurrent requests: a GPU's step of few tokens takes as long as one of hundreds, and requests that
        miss the first step wait for all of it."""
        until = time.perf_counter() + SECONDS_FOR_ALL
        most, waiting = self.config.scheduler_config.max_num_batched_tokens, self.engine.scheduler.waiting
        while time.perf_counter() < until and sum(request.num_tokens for request in waiting) < most:
            time.sleep(SECONDS_TO_NEXT)
            if self.call_queue.is_empty:
                return
            self.call_queue.run(self.engine, wait=False)

    def _step(self) -> None:
        steps = self.engine.metrics.steps
        outputs = self.engine.step()
        self._wake()  # it may have launched nothing
        self._did_nothing = not outputs and steps == self.engine.metrics.steps
        self._deliver(outputs)
        if self.sinks and not self.engine.has_unfinished_requests():
            self._deliver([aborted(i, None) for i in self.sinks])  # a call aborted them in the engine itself

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs into their sinks. On a GPU consumers are woken during the next step, if there will be one."""
        for output in outputs:
            sink = self.sinks.get(output.request_id)
            if output.finished:
                self.sinks.pop(output.request_id, None)
            if sink is not None and sink.put(output):
                self._due.append(sink)
        if not (self._on_gpu and self.sinks):
            self._wake()
        if self._lost:  # not within a step
            gone = [request_id for request_id, sink in self.sinks.items() if sink in self._lost]
            for request_id in gone:
                del self.sinks[request_id]
            self._lost.clear()
            self.engine.abort_request(gone)

    def _wake(self) -> None:
        due, self._due = self._due, []
        self._lost += wake(due)
        self._on_wake()

    def _end(self, error: Exception) -> None:
        """Refuse all calls, and put the error into all sinks. The engine keeps the requests."""
        self._on_end(error)
        self.call_queue.end(error)
        # Also of requests whose adapters are being checked: a disk may take for ever.
        sinks = [*self.sinks.values(), *self._checking.values()]
        self.sinks, self._checking = {}, {}
        self._wake()
        wake([sink for sink in sinks if sink.put(error)])


def _put_error(sink: Sink, called: Future) -> None:
    """Put the error of a call, if it raised one, into the sink of the request that it was for."""
    if not called.cancelled() and (error := called.exception()) is not None and sink.put(error):
        wake([sink])
