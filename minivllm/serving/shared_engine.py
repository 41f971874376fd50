"""One engine for callers in several threads, who wait for their answers. vLLM's `LLM` has none (v0.22.1)."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.guards.turns import IN_THE_MIDDLE, no_interrupts
from minivllm.serving.engine_loop import EngineLoop
from minivllm.serving.errors import died_of

T = TypeVar("T")


class SharedEngine:
    """Who is alone steps the engine himself. When a second caller comes, a thread does it for all, until all have left.

    So one thread alone pays nothing for others, and Ctrl-C, which comes to the main thread, meets what was there
    before. Requests of all callers are in one batch.

    driver   who may call the engine: a caller that is alone, the thread, or nobody
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine)
        self.request_numbers = itertools.count()
        self.driver: Caller | threading.Thread | None = None
        # Held while it is decided who drives; again by the same thread, for a signal handler's call.
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def caller(self) -> Iterator["Caller"]:
        """Around one caller's calls. After an error or Ctrl-C nothing of its requests is left."""
        caller = Caller(self)
        try:
            yield caller
            self.leave(caller)
        except BaseException:
            with no_interrupts():
                caller.give_up()
                self.leave(caller)
            raise

    def call(self, function: Callable[[LLMEngine], T]) -> T:
        """The result of `function(engine)`, between two steps if the engine is at work."""
        with self.caller() as caller:
            return caller.call(function)

    def leave(self, caller: "Caller") -> None:
        """Others that have come meanwhile get a thread."""
        with self.lock:
            if self.driver is caller:
                self.driver = None
                if not self.loop.is_idle:
                    self.start_thread()

    def start_thread(self) -> None:
        with no_interrupts():  # a driver that never starts would keep everybody waiting
            self.driver = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
            self.driver.start()

    def _run(self) -> None:
        while True:
            with self.lock:
                if self.loop.is_idle:
                    self.driver = None
                    return
            try:
                self.loop.turn()
            except BaseException as error:  # whatever it is, whoever waits must hear of it
                # Each of them ends his requests (`give_up`).
                self.loop.fail(error if isinstance(error, Exception) else died_of(error))


class Caller:
    """One caller's requests.

    ids   of the requests, by the order in which they were given to `begin`
    """

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.ids: list[str] = []
        self._wanted: frozenset[str] = frozenset()  # the same
        self._thread_id = threading.get_ident()
        self._outputs: queue.SimpleQueue[RequestOutput | Exception] = queue.SimpleQueue()
        self._future: Future | None = None

    @property
    def is_alone(self) -> bool:
        return self.shared.driver is self

    def call(self, function: Callable[[LLMEngine], T]) -> T:
        """The result of `function(engine)`: at once for who is alone."""
        with self.shared.lock:
            driver = self.shared.driver
            if isinstance(driver, Caller) and driver is not self and driver._thread_id == self._thread_id:
                raise RuntimeError(IN_THE_MIDDLE.format("LLM"))
            if driver is None:
                self.shared.driver = self
            if not self.is_alone:
                self._future = self.shared.loop.call(function)
        return function(self.shared.engine) if self.is_alone else self._future.result()

    def begin(self, requests: Sequence[tuple[Any, Any, Any]]) -> None:
        """Add requests: prompt, sampling parameters and adapter of each. ValueError if any cannot be served."""
        self.call(lambda engine: self._add(engine, requests))

    def _add(self, engine: LLMEngine, requests: Sequence[tuple[Any, Any, Any]]) -> None:
        # Ids that nobody has, known before any request is in the engine: an interrupt may come between any two lines.
        numbers = map(str, self.shared.request_numbers)
        self.ids = list(itertools.islice((i for i in numbers if not engine.knows(i)), len(requests)))
        self._wanted = frozenset(self.ids)
        for request_id, (prompt, params, lora) in zip(self.ids, requests):
            engine.add_request(request_id, prompt, params, lora_request=lora)
            if not self.is_alone:
                self.shared.loop.sinks[request_id] = self._outputs

    def take(self) -> list[RequestOutput]:
        """Outputs of the requests, of a step or of several: who is alone takes one."""
        if self.is_alone and self.shared.loop.hand_over.waits:
            self._share()
        if self.is_alone:
            return self.shared.engine.step(of=self._wanted)
        outputs = [self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get())
        for error in outputs:
            if isinstance(error, Exception):
                raise error
        return outputs

    def _share(self) -> None:
        """From now on a thread steps the engine, for others too."""
        engine = self.shared.engine
        self.shared.loop.sinks |= {i: self._outputs for i in self.ids if engine.knows(i)}
        with self.shared.lock:
            self.shared.start_thread()

    def give_up(self) -> None:
        """End the requests, if they have not ended, and have nothing more come of them."""
        if self._future is not None:
            self._future.cancel()
        if self.ids or self._future is not None:
            self.call(self._drop)

    def _drop(self, engine: LLMEngine) -> None:
        engine.abort_request(self.ids)
        for request_id in self.ids:
            self.shared.loop.sinks.pop(request_id, None)
