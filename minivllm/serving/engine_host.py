"""The process that has an engine: `python -m minivllm.serving.engine_host FD`, which `EngineProcess` starts.

Stands for `EngineCoreProc` of vllm/v1/engine/core.py (v0.22.1).
"""

import logging
import logging.handlers
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import message_of
from minivllm.lora.request import LoRARequest
from minivllm.processes import packed, pipe_to_parent, receive, send
from minivllm.progress import told_to
from minivllm.serving.calls import CALLS, by_name
from minivllm.serving.engine_thread import EngineThread
from minivllm.serving.pauses import avoid_pauses
from minivllm.serving.wire import Order, OutputWriter, portable


class Outbox:
    """Messages to the process that asks: what has come is sent at once, as one. Any thread may use it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.RLock()
        self._waiting: list[tuple[str, Any, Any]] = []

    def add(self, kind: str, number: int | None, value: Any) -> None:
        """kind: of `EngineProcess`' methods the one that takes number and value, `on_<kind>`"""
        with self._lock:
            self._waiting.append((kind, number, value))

    def flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if waiting:
                with suppress(OSError):  # nobody asks any more: the receiving thread ends this process
                    send(self._pipe, waiting)

    def send(self, kind: str, number: int | None, value: Any) -> None:
        """Now, behind what waits."""
        self.add(kind, number, value)
        self.flush()


class RemoteSink(OutputWriter):
    """A request's outputs on their way to the other process."""

    def __init__(self, number: int, outbox: Outbox, ended: Callable[[int], object]) -> None:
        super().__init__()
        self._number, self._outbox, self._ended = number, outbox, ended

    def put(self, item: RequestOutput | Exception) -> None:
        """An output waits for those of the other requests; an error is sent at once."""
        is_error = isinstance(item, Exception)
        if is_error:
            self._outbox.send("refusal", self._number, portable(item))
        else:
            self._outbox.add("output", self._number, self.delta(item))
        if is_error or item.finished:
            self._ended(self._number)


class HostedEngine(EngineThread):
    """An engine whose outputs leave its process, those of a step in one message."""

    def __init__(self, engine: LLMEngine, parallel_reads: int, outbox: Outbox) -> None:
        self._outbox = outbox
        self._known: dict[str, int] = {}
        super().__init__(engine, parallel_reads)

    def call(self, function: Callable[..., Any], *args: Any) -> Future:
        """As `EngineLoop.call`. The other process hears of new names before it hears that the call was done."""
        return super().call(self._call, function, args)

    def _call(self, engine: LLMEngine, function: Callable[..., Any], args: tuple) -> Any:
        try:
            return function(engine, *args)
        finally:
            self._tell_names()

    def _tell_names(self) -> None:
        """Of adapters, if they are others than the last time."""
        if self.engine.adapters is not None and self.engine.adapters.by_name != self._known:
            self._known = dict(self.engine.adapters.by_name)
            self._outbox.add("names", None, list(self._known))

    def _wake(self) -> None:
        self._tell_names()
        self._outbox.flush()

    def _run(self) -> None:
        try:
            super()._run()
        except BaseException as error:  # also at the very end
            self._outbox.send("death", None, portable(error))
            raise

    def _end(self, error: Exception) -> None:
        # First of all: who hears of the end by a request may ask at once how the engine is.
        self._outbox.send("death", None, portable(error))
        super()._end(error)


class EngineHost:
    """Does what the other process asks: its orders name one of the methods below (`wire.order`)."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._outbox = pipe, Outbox(pipe)
        self._sinks: dict[int, RemoteSink] = {}
        self._calls: dict[int, Future] = {}
        self._listeners: dict[int, Callable[[Any], object]] = {}

    def start(self) -> None:
        """Make the engine. What that raises is raised at the other end."""
        make_engine, parallel_reads, more_calls, levels, is_followed = receive(self._pipe)
        self._known = by_name((*CALLS, *more_calls))
        send_logs(self._outbox, levels)
        told = told_to(self._tell_progress) if is_followed else nullcontext()
        try:
            with told:
                engine = make_engine()
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            self._outbox.send("failure", None, portable(error))
            raise SystemExit(1) from None
        avoid_pauses()
        self.engine = HostedEngine(engine, parallel_reads, self._outbox)
        self._outbox.send("start", None, (engine.config, engine.tokenizer))

    def _tell_progress(self, *progress: Any) -> None:
        self._outbox.send("progress", None, progress)

    def serve(self) -> None:
        """Until the other process says so, or is no more."""
        try:
            while self._do_all(receive(self._pipe)):
                pass
        except (EOFError, OSError):
            return  # nobody would hear of anything
        self.engine.stop()
        self._outbox.flush()

    def _do_all(self, orders: list[Order | None]) -> bool:
        """False: the last of them says that it is the end."""
        for each in orders:
            if each is None:
                return False
            self._do(*each)
        return True

    def _do(self, number: int, name: str, pickled: bytes) -> None:
        try:
            args = pickle.loads(pickled)
        except Exception as error:  # whatever arguments do when they are read
            self._outbox.send("refusal", number, portable(error))
        else:
            getattr(self, name)(number, *args)

    # ---- what is asked --------------------------------------------------------------------------------------

    def call(self, number: int, name: str, *args: Any) -> None:
        self._answer(number, self.engine.call(self._known[name], *args))

    def cancel(self, number: int) -> None:
        if (future := self._calls.get(number)) is not None:
            future.cancel()

    def begin(self, number: int, args: tuple, options: dict[str, Any]) -> None:
        sink = RemoteSink(number, self._outbox, lambda number: self._sinks.pop(number, None))
        self._sinks[number] = sink
        self.engine.begin(sink, *args, **options)

    def abort(self, number: int, request_ids: list[str], sink: int | None) -> None:
        if sink is not None and sink not in self._sinks:  # it has ended
            self._outbox.send("reply", number, packed(None))
        else:
            own = None if sink is None else self._sinks.get(sink)
            self._answer(number, self.engine.abort(request_ids, own))

    def read_ahead(self, number: int, lora_request: LoRARequest) -> None:
        self._answer(number, self.engine.read_ahead(lora_request))

    def end_ahead(self, number: int, lora_request: LoRARequest) -> None:
        self.engine.end_ahead(lora_request)

    def watch_steps(self, number: int, listener: int) -> None:
        self._answer(number, self.engine.watch_steps(self._listener(listener)))

    def unwatch_steps(self, number: int, listener: int) -> None:
        self._answer(number, self.engine.unwatch_steps(self._listeners.pop(listener, print)))

    def watch_adapters(self, number: int, listener: int) -> None:
        self._answer(number, self.engine.watch_adapters(self._listener(listener)))

    def _listener(self, number: int) -> Callable[[Any], object]:
        self._listeners[number] = partial(self._outbox.add, "event", number)
        return self._listeners[number]

    # ---- what comes of it -----------------------------------------------------------------------------------

    def _answer(self, number: int, future: Future) -> None:
        self._calls[number] = future
        future.add_done_callback(partial(self._reply, number))

    def _reply(self, number: int, future: Future) -> None:
        self._calls.pop(number, None)
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._outbox.send("refusal", number, portable(error))
        elif isinstance(result := future.result(), Future):
            result.add_done_callback(partial(self._reply, number))
        else:
            try:
                pickled = packed(result)
            except Exception as error:  # a result can be anything
                said = f"the result cannot be sent to another process: {message_of(error)}"
                self._outbox.send("refusal", number, RuntimeError(said))
            else:
                self._outbox.send("reply", number, pickled)


def send_logs(outbox: Outbox, levels: dict[str, int]) -> None:
    """What is logged here is logged there. levels: name of a logger -> its level there"""
    logging.root.handlers = [_LogSender(outbox)]
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


class _LogSender(logging.handlers.QueueHandler):
    """Records go as texts, with what was raised in them."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(SimpleQueue())
        self._outbox = outbox

    def enqueue(self, record: logging.LogRecord) -> None:
        self._outbox.send("log", None, record)


def main(descriptor: int) -> None:
    """Serve the process at the other end until it says so, or is no more."""
    host = EngineHost(pipe_to_parent(descriptor))
    host.start()
    host.serve()
    os._exit(0)  # without waiting for threads that read adapters


if __name__ == "__main__":
    main(int(sys.argv[1]))
