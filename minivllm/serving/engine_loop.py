"""Steps of an engine, and calls of others between them. Stands for `EngineCoreProc.run_busy_loop` of
vllm/v1/engine/core.py (v0.22.1).

The core's thread (`engine/engine_thread.py`) does alike work for `LLM`, whose callers wait: they have its outputs step
by step, and a step that fails ends their requests alone. Here nobody may wait, so that a call is a future, and one that
comes after the end is refused; a loop is woken once for all its requests, on a GPU beside the step; and a step that
fails ends the engine. Both have a queue of functions and futures in common, a dozen lines of the core's. The core would
have to grow by all the rest to be used here.
"""

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from minivllm.core.output import SchedulerOutput
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.lora.events import LoRAEvent
from minivllm.observe.trace import StepRecord
from minivllm.serving.hand_over import HandOver
from minivllm.serving.streams import aborted, wake

T = TypeVar("T")

# An idle engine waits for whoever comes right behind the first request: so long for the next one, and for all.
SECONDS_TO_NEXT, SECONDS_FOR_ALL = 0.001, 0.01


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
        self._did_nothing = False  # the last step
        self._due: list[Sink] = []  # have outputs, and are not woken yet
        self._lost: list[Sink] = []  # could not be woken: their event loop is closed
        self._watching: dict[Callable, Callable[[SchedulerOutput], object]] = {}  # listener -> the engine's
        # While a GPU computes, this thread waits without the GIL: a good time for others to send what they have.
        self._on_gpu = engine.runner.on_gpu
        if self._on_gpu:
            engine.listeners.append(lambda scheduled: self._wake())

    @property
    def is_idle(self) -> bool:
        return not self.sinks and not self.hand_over.waits

    # ---- from any thread, for between two steps ---------------------------------------------------------------

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """The result of `function(engine, *args)` (`HandOver.call`)."""
        return self.hand_over.call(partial(_with, function, args))

    def begin(self, sink: Sink, request_id: str, *args: Any, **options: Any) -> None:
        """Add a request. Its outputs go to `sink`, and so does what `LLMEngine.add_request` raises."""
        self._tell_refusals(sink, self.call(self._begin, sink, request_id, args, options))

    def _tell_refusals(self, sink: Sink, begun: "Future[None]") -> None:
        begun.add_done_callback(partial(_tell_refusal, sink))

    def abort(self, request_ids: Collection[str], sink: Sink | None = None) -> "Future[None]":
        """End requests, each with a last output that says so; nothing is done for those that have ended.

        sink   only those that are this one's: another may have their ids by now
        """
        return self.call(self._abort, list(request_ids), sink)

    def watch_steps(self, listener: Callable[[StepRecord], object]) -> "Future[None]":
        """Tell a listener of every step from now on, in the engine's thread."""
        return self.call(self._watch_steps, listener)

    def unwatch_steps(self, listener: Callable[[StepRecord], object]) -> "Future[None]":
        """It is told no more; one that never was is passed over."""
        return self.call(self._unwatch_steps, listener)

    def watch_adapters(self, listener: Callable[[LoRAEvent], object]) -> "Future[None]":
        """Tell a listener of what happens to adapters from now on, in the engine's thread."""
        return self.call(_watch_adapters, listener)

    # ---- in the engine's thread -----------------------------------------------------------------------------

    def turn(self, wait: bool = False) -> None:
        """Run the calls there are, and take a step if somebody waits for one.

        wait   for a call, if there is nothing to do

        Raises what ends the engine.
        """
        nothing_to_do = not self.sinks or (self._did_nothing and self.is_held_up())
        if nothing_to_do or self.hand_over.waits:
            self._wake()
        was_idle = not self.sinks
        self.hand_over.run(self.engine, wait=wait and nothing_to_do)
        if was_idle and self.sinks and self._on_gpu:
            self._let_others_in()
        if self.sinks:
            self._step()

    def _let_others_in(self) -> None:
        """A GPU's step of few tokens takes as long as one of hundreds: whoever comes now would wait for all of it."""
        until = time.perf_counter() + SECONDS_FOR_ALL
        while time.perf_counter() < until and not self._fills_a_step():
            time.sleep(SECONDS_TO_NEXT)
            if not self.hand_over.waits:
                return
            self.hand_over.run(self.engine, wait=False)

    def _fills_a_step(self) -> bool:
        tokens = sum(request.num_tokens for request in self.engine.scheduler.waiting)
        return tokens >= self.engine.config.scheduler_config.max_num_batched_tokens

    def _begin(
        self, engine: LLMEngine, sink: Sink, request_id: str, args: tuple, options: dict[str, Any]
    ) -> None:
        engine.add_request(request_id, *args, **options)
        self.sinks[request_id] = sink

    def _abort(self, engine: LLMEngine, request_ids: list[str], sink: Sink | None) -> None:
        found = {i: self.sinks[i] for i in request_ids if i in self.sinks}
        found = {i: own for i, own in found.items() if sink in (None, own)}
        engine.abort_request(list(found))
        self._deliver([aborted(i, getattr(own, "last", None)) for i, own in found.items()])

    def _watch_steps(self, engine: LLMEngine, listener: Callable[[StepRecord], object]) -> None:
        # The engine's recorder has heard of the step already.
        self._watching[listener] = lambda scheduled: listener(engine.trace.records[-1])
        engine.listeners.append(self._watching[listener])

    def _unwatch_steps(self, engine: LLMEngine, listener: Callable[[StepRecord], object]) -> None:
        if (watching := self._watching.pop(listener, None)) is not None:
            engine.listeners.remove(watching)

    def fail(self, error: Exception) -> None:
        """Whoever waits for outputs gets this error. The engine keeps the requests."""
        sinks, self.sinks = self.sinks, {}
        self._wake()
        wake([sink for sink in sinks.values() if sink.put(error)])

    def _step(self) -> None:
        steps = self.engine.metrics.steps
        outputs = self.engine.step()
        self._wake()  # it may have launched nothing
        self._did_nothing = not outputs and steps == self.engine.metrics.steps
        self._deliver(outputs)
        if self.sinks and not self.engine.has_unfinished_requests():
            self._deliver([aborted(i, None) for i in self.sinks])  # somebody aborted them behind our back

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand outputs to their sinks. Whoever has to be woken is woken beside the next step, if one will come."""
        for output in outputs:
            sink = self.sinks.get(output.request_id)
            if output.finished:
                self.sinks.pop(output.request_id, None)
            if sink is not None and sink.put(output):
                self._due.append(sink)
        if not (self._on_gpu and self.sinks):
            self._wake()
        self._forget_lost()

    def _wake(self) -> None:
        due, self._due = self._due, []
        self._lost += wake(due)

    def _forget_lost(self) -> None:
        """Abort the requests of those whose event loop is closed. Not within a step."""
        if self._lost:
            gone = [request_id for request_id, sink in self.sinks.items() if sink in self._lost]
            for request_id in gone:
                del self.sinks[request_id]
            self._lost.clear()
            self.engine.abort_request(gone)


def _with(function: Callable[..., T], args: tuple, engine: LLMEngine) -> T:
    return function(engine, *args)


def _tell_refusal(sink: Sink, begun: "Future[None]") -> None:
    """The request is not in the engine: whoever waits for its outputs hears why."""
    if not begun.cancelled() and (error := begun.exception()) is not None and sink.put(error):
        wake([sink])


def _watch_adapters(engine: LLMEngine, listener: Callable[[LoRAEvent], object]) -> None:
    if engine.adapters is not None:
        engine.adapters.manager.listeners.append(listener)
