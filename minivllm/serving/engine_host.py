"""The process of an engine: `python -m minivllm.serving.engine_host FD`, which `EngineProcess` starts.

Stands for `EngineCoreProc.run_engine_core` and the I/O threads of vllm/v1/engine/core.py (v0.22.1).
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

from minivllm.engine.outputs import RequestOutput
from minivllm.errors import message_of
from minivllm.lora.request import LoRARequest
from minivllm.processes import avoid_pauses, packed, pipe_to_parent, receive, send
from minivllm.progress import told_to
from minivllm.serving.calls import CALLS, name_of
from minivllm.serving.client import EngineCoreRequest
from minivllm.serving.engine_thread import EngineThread
from minivllm.serving.wire import OutputWriter, Request, portable


class Outbox:
    """Replies to the client's process: those that are added until a flush are sent as one message. Thread-safe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.RLock()
        self._waiting: list[tuple[str, Any, Any]] = []

    def add(self, kind: str, number: int | None, value: Any) -> None:
        """kind: `EngineProcess.on_<kind>` is called with number and value"""
        with self._lock:
            self._waiting.append((kind, number, value))

    def flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if waiting:
                with suppress(OSError):  # the client has ended: the receiving thread ends this process
                    send(self._pipe, waiting)

    def send(self, kind: str, number: int | None, value: Any) -> None:
        """Add a reply and flush."""
        self.add(kind, number, value)
        self.flush()


class RemoteSink(OutputWriter):
    """A `Sink` that sends a request's outputs to the client's process.   finish: is called after the last"""

    def __init__(self, number: int, outbox: Outbox, finish: Callable[[int], object]) -> None:
        super().__init__()
        self._number, self._outbox, self._finish = number, outbox, finish

    def put(self, item: RequestOutput | Exception) -> None:
        """Send an output with those of the other requests, an error at once."""
        is_error = isinstance(item, Exception)
        if is_error:
            self._outbox.send("failure", self._number, portable(item))
        else:
            self._outbox.add("output", self._number, self.delta(item))
        if is_error or item.finished:
            self._finish(self._number)


class EngineHost:
    """Makes the engine and carries out the client's requests, each of which names one of the methods below."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._outbox = pipe, Outbox(pipe)
        self._sinks: dict[int, RemoteSink] = {}
        self._calls: dict[int, Future] = {}
        self._listeners: dict[int, Callable[[Any], object]] = {}
        self._names: dict[str, int] = {}  # of adapters, as they were sent last

    def start(self) -> None:
        """Make the engine. An error of that is raised in the client's process."""
        make_engine, parallel_reads, more_calls, levels, is_followed = receive(self._pipe)
        self._functions = {name_of(function): function for function in (*CALLS, *more_calls)}
        send_logs(self._outbox, levels)
        progress = told_to(self._send_progress) if is_followed else nullcontext()
        try:
            with progress:
                engine = make_engine()
        except BaseException as error:  # of any kind, because the client waits
            self._outbox.send("not_made", None, portable(error))
            raise SystemExit(1) from None
        avoid_pauses()
        self._adapters = engine.adapters
        # The end is sent first, because a client that gets an error of a request may check the engine's health at once.
        self.engine = EngineThread(
            engine,
            parallel_reads,
            on_wake=self._flush,
            on_end=lambda error: self._outbox.send("death", None, portable(error)),
        )
        self._outbox.send("start", None, (engine.config, engine.tokenizer))

    def _send_progress(self, *progress: Any) -> None:
        self._outbox.send("progress", None, progress)

    def serve(self) -> None:
        """Carry out requests until the client stops the engine or has ended."""
        try:
            while self._carry_out(receive(self._pipe)):
                pass
        except (EOFError, OSError):
            return  # the client has ended
        self.engine.stop()
        self._outbox.flush()

    def _carry_out(self, requests: list[Request | None]) -> bool:
        """False: the last of them is None, which ends the process."""
        for request in requests:
            if request is None:
                return False
            number, method, pickled = request
            try:
                args = pickle.loads(pickled)
            except Exception as error:  # of any kind: arguments that cannot be unpickled
                self._outbox.send("failure", number, portable(error))
            else:
                getattr(self, method)(number, *args)
        return True

    # ---- requests of the client -----------------------------------------------------------------------------

    def call(self, number: int, name: str, *args: Any) -> None:
        self._reply_with(number, self.engine.call(self._functions[name], *args))

    def cancel(self, number: int) -> None:
        if (future := self._calls.get(number)) is not None:
            future.cancel()

    def begin(self, number: int, *request: Any) -> None:
        sink = RemoteSink(number, self._outbox, lambda number: self._sinks.pop(number, None))
        self._sinks[number] = sink
        self.engine.begin(sink, EngineCoreRequest(*request))

    def abort(self, number: int, request_ids: list[str], sink: int | None) -> None:
        if sink is not None and sink not in self._sinks:  # the request has finished
            self._outbox.send("reply", number, packed(None))
        else:
            own = None if sink is None else self._sinks.get(sink)
            self._reply_with(number, self.engine.abort(request_ids, own))

    def read_ahead(self, number: int, lora_request: LoRARequest) -> None:
        self._reply_with(number, self.engine.read_ahead(lora_request))

    def end_ahead(self, number: int, lora_request: LoRARequest) -> None:
        self.engine.end_ahead(lora_request)

    def subscribe(self, number: int, name: str, listener: int) -> None:
        self._listeners[listener] = partial(self._outbox.add, "event", listener)
        self._reply_with(number, self.engine.subscribe(self._functions[name], self._listeners[listener]))

    def unsubscribe(self, number: int, listener: int) -> None:
        self._reply_with(number, self.engine.unsubscribe(self._listeners.pop(listener, None)))

    # ---- in the engine's thread: replies --------------------------------------------------------------------

    def _flush(self) -> None:
        """Send the outputs of a step as one message."""
        self._add_names()
        self._outbox.flush()

    def _add_names(self) -> None:
        """The names of the engine's adapters, if they have changed; sent before the reply of the call that did it."""
        if self._adapters is not None and self._adapters.by_name != self._names:
            self._names = dict(self._adapters.by_name)
            self._outbox.add("names", None, list(self._names))

    def _reply_with(self, number: int, future: Future) -> None:
        self._calls[number] = future
        future.add_done_callback(partial(self._reply, number))

    def _reply(self, number: int, future: Future) -> None:
        self._calls.pop(number, None)
        if future.cancelled():
            return
        self._add_names()
        if (error := future.exception()) is not None:
            self._outbox.send("failure", number, portable(error))
        elif isinstance(result := future.result(), Future):  # of `read_ahead`
            result.add_done_callback(partial(self._reply, number))
        else:
            try:
                pickled = packed(result)
            except Exception as error:  # of any kind: a result that cannot be pickled
                said = f"the result cannot be sent to another process: {message_of(error)}"
                self._outbox.send("failure", number, RuntimeError(said))
            else:
                self._outbox.send("reply", number, pickled)


def send_logs(outbox: Outbox, levels: dict[str, int]) -> None:
    """Send this process's log records to the client's.   levels: name of a logger -> its level there"""
    logging.root.handlers = [_LogSender(outbox)]
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


class _LogSender(logging.handlers.QueueHandler):
    """Sends records with their arguments and exceptions as text (`QueueHandler.prepare`)."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(SimpleQueue())
        self._outbox = outbox

    def enqueue(self, record: logging.LogRecord) -> None:
        self._outbox.send("log", None, record)


def main(descriptor: int) -> None:
    """Serve the client at the other end of a pipe until it stops the engine or ends."""
    host = EngineHost(pipe_to_parent(descriptor))
    host.start()
    host.serve()
    os._exit(0)  # without waiting for threads that read adapters


if __name__ == "__main__":
    main(int(sys.argv[1]))
