"""The thread that has the engine of an `LLM`, for callers in others.

Stands for `EngineCoreProc` of vllm/v1/engine/core.py (v0.22.1), which is a process.
"""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from minivllm.engine.llm_engine import IN_THE_MIDDLE, EngineBusy, LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import EngineDeadError, died_of

T = TypeVar("T")

# Prompt, sampling parameters and adapter, as `LLMEngine.add_request` takes them.
Asked = tuple[Any, Any, Any]
# Where a caller's outputs go, those of a step together, or the error that ends them.
Outputs = queue.SimpleQueue[list[RequestOutput] | Exception]

SECONDS_TO_STOP = 10.0
SECONDS_UNTIL_FREE = 0.001


class LLMThread:
    """Makes an engine in a thread, and steps it there while somebody waits for outputs.

    No signal comes to that thread, so Ctrl-C ends a caller's waiting and never a step. The model is loaded there, too:
    PyTorch's threads on a CPU belong to the thread that computes, and a second one that does has threads of its own.
    It ends with this object.

    engine   what others may read between two calls: counters, adapters
    """

    def __init__(self, make_engine: Callable[[], LLMEngine]) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        made: Future[LLMEngine] = Future()
        run = copy_context().run  # whoever follows the progress of loading follows it there
        self._thread = threading.Thread(
            target=run, args=(_run, make_engine, made, self._calls), name="minivllm-engine", daemon=True
        )
        try:
            self._thread.start()
            self.engine = made.result()
        except BaseException:
            self._calls.put(None)  # a Ctrl-C while the model is loaded
            raise
        # At the end of the process, too: a thread in the middle of a step would be cut off.
        self._stop = weakref.finalize(self, _stop, self._calls, self._thread)

    def call(self, function: Callable[[LLMEngine], T]) -> T:
        """The result of `function(engine)`, between two steps. EngineDeadError where the thread is no more."""
        return self._call(lambda loop: function(loop.engine))

    def begin(self, requests: Sequence[Asked], outputs: Outputs) -> list[str]:
        """Add all requests, or none if one raises, and have their outputs put into a queue; their ids."""
        return self._call(lambda loop: loop.begin(requests, outputs))

    def abandon(self, outputs: Outputs) -> None:
        """End the requests whose outputs go there, those among them that are still to be added."""
        self._call(lambda loop: loop.abandon(outputs))

    def _call(self, function: "Callable[[_Loop], T]") -> T:
        if threading.current_thread() is self._thread:
            raise RuntimeError(IN_THE_MIDDLE.format("LLM"))
        future: Future[T] = Future()
        self._calls.put((function, future))
        if not self._thread.is_alive():
            raise EngineDeadError(
                "the engine's thread has ended, or is another process's; make another engine"
            )
        return future.result()


_Call = tuple[Callable[["_Loop"], Any], Future]


class _Loop:
    """What the thread has: its engine, and for each request that was added where its outputs go."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.outputs: dict[str, Outputs] = {}
        self.numbers = itertools.count()

    def begin(self, requests: Sequence[Asked], outputs: Outputs) -> list[str]:
        free = (str(n) for n in self.numbers if not self.engine.knows(str(n)))
        ids = list(itertools.islice(free, len(requests)))
        try:
            for request_id, (prompt, params, lora_request) in zip(ids, requests):
                self._when_free(
                    self.engine.add_request, request_id, prompt, params, lora_request=lora_request
                )
                self.outputs[request_id] = outputs
        except BaseException:
            self.abandon(outputs)
            raise
        return ids

    def abandon(self, outputs: Outputs) -> None:
        ids = [request_id for request_id, theirs in self.outputs.items() if theirs is outputs]
        for request_id in ids:
            del self.outputs[request_id]
        with suppress(EngineDeadError):  # nobody steps it any more
            self._when_free(self.engine.abort_request, ids)

    def _when_free(self, method: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a method of the engine once no other thread is in a call of it.

        A thread that calls the engine itself, past this one, must not end the requests of callers here.
        """
        while True:
            try:
                return method(*args, **options)
            except EngineBusy:
                time.sleep(SECONDS_UNTIL_FREE)

    def run(self, calls: "queue.SimpleQueue[_Call | None]") -> None:
        """Until there is a call that is None: then nobody waits, or the process ends."""
        while self._do_calls(calls):
            self._step()

    def _do_calls(self, calls: "queue.SimpleQueue[_Call | None]") -> bool:
        """Do the calls that have come; wait for one while nobody waits for outputs. False: it is the end."""
        while not self.outputs or not calls.empty():
            call = calls.get()
            if call is None:
                return False
            _do(call, self)
            del call  # what was asked, and by whom, is not kept until the next one comes
        return True

    def _step(self) -> None:
        try:
            outputs = self._when_free(self.engine.step)
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            callers, self.outputs = set(self.outputs.values()), {}
            for caller in callers:
                caller.put(error if isinstance(error, Exception) else died_of(error))
            return
        by_caller: dict[Outputs, list[RequestOutput]] = {}
        for output in outputs:
            if (caller := self.outputs.get(output.request_id)) is not None:
                by_caller.setdefault(caller, []).append(output)
                if output.finished:
                    del self.outputs[output.request_id]
        for caller, theirs in by_caller.items():
            caller.put(theirs)


def _run(
    make_engine: Callable[[], LLMEngine],
    made: "Future[LLMEngine]",
    calls: "queue.SimpleQueue[_Call | None]",
) -> None:
    try:
        loop = _Loop(make_engine())
    except BaseException as error:  # raised again where the thread was started
        made.set_exception(error)
        return
    made.set_result(loop.engine)
    del make_engine, made
    loop.run(calls)


def _do(call: _Call, loop: _Loop) -> None:
    function, future = call
    try:
        result = function(loop)
    except BaseException as error:
        future.set_exception(error if isinstance(error, Exception) else died_of(error))
    else:
        future.set_result(result)


def _stop(calls: "queue.SimpleQueue[_Call | None]", thread: threading.Thread) -> None:
    calls.put(None)
    if threading.current_thread() is not thread:  # it may be the one that collects garbage
        thread.join(SECONDS_TO_STOP)
