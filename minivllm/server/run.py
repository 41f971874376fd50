"""Runs a server until a signal ends it. Stands for vllm/entrypoints/launcher.py (v0.22.1)."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from minivllm.errors import EngineDeadError
from minivllm.server.connection import LimitedConnection
from minivllm.server.settings import ServerSettings

# For the connections to be flushed when all requests have finished.
SECONDS_TO_FLUSH = 5
# Likewise, when the server is forced to end.
SECONDS_IF_FORCED = 1.0


class DrainingServer(uvicorn.Server):
    """A server with graceful shutdown: on SIGTERM or Ctrl-C it takes no new requests, and running ones may finish.

    Meanwhile new requests get 503, and so does /health. After `drain_seconds` the engine is shut down, and a request
    that has not finished gets an error. A second signal forces the end: the engine is killed in the middle of its
    step, all requests get that error, and a connection that is still open a second later is closed.

    ends_with_engine   whether it also ends once the engine's process has died, so that what started it starts it anew.
                       `run` then raises the EngineDeadError. Its requests have had that error before. vLLM: likewise
    """

    def __init__(
        self, app: Starlette, settings: ServerSettings, ends_with_engine: bool = False, **options: object
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(LimitedConnection, settings=settings),
            loop="asyncio",
            ws="none",
            lifespan="on",
            access_log=False,
            server_header=False,
            log_level="warning",
            timeout_graceful_shutdown=SECONDS_TO_FLUSH,
            **options,
        )
        super().__init__(config)
        self.state, self.settings, self.ends_with_engine = app.state, settings, ends_with_engine
        self._engine_error: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_forced = False
        self._shutdown_tasks: list[asyncio.Task] = []  # the loop itself keeps no reference

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second; True ends the server."""
        if self.ends_with_engine and not self.state.server.is_draining:
            try:
                await self.state.llm.check_health()
            except EngineDeadError as error:
                self._engine_error = error
                return True
        return await super().on_tick(counter)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        if self._engine_error is not None:
            raise self._engine_error

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, at any point of the loop's thread."""
        if self._loop is None:
            super().handle_exit(sig, frame)
        elif not self.state.server.is_draining:
            self.state.server.is_draining = True
            self._loop.call_soon_threadsafe(self._run_in_task, self._drain)
        elif not self._is_forced:
            self._is_forced = True
            self._captured_signals.append(sig)  # so that the process ends by it
            self._loop.call_soon_threadsafe(self._run_in_task, self._force_end)

    def drain(self) -> None:
        """The same as a SIGTERM, from any thread; a second call is the same as a second signal."""
        self.handle_exit(signal.SIGTERM, None)

    def _run_in_task(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._shutdown_tasks.append(asyncio.ensure_future(function()))

    async def _drain(self) -> None:
        try:
            await self.state.llm.drain(self.settings.drain_seconds)
            await asyncio.to_thread(self.state.llm.shutdown)
        finally:
            self.should_exit = True

    async def _force_end(self) -> None:
        # Not in a thread of the loop's pool: all of those may be blocked by a disk.
        threading.Thread(target=self.state.llm.shutdown, args=(0,), daemon=True).start()
        self.should_exit = True
        await asyncio.sleep(SECONDS_IF_FORCED)
        if tasks := list(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=SECONDS_IF_FORCED)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def bind(host: str, port: int, write_seconds: float) -> socket.socket:
    """A listening socket; port 0 is any free one. OSError names the option to change. ValueError for an empty host.

    write_seconds   after which the system closes a connection whose client acknowledges nothing
    """
    if not host:  # the system takes it for every address
        raise ValueError("--host must not be empty; leave it out, or pass 0.0.0.0 for every address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; pass another {option}"
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * write_seconds))
    return found


class ServerThread:
    """A server in a thread of this process, for notebooks and tests: `with ServerThread(app, settings) as server:`.

    url   its address, with a free port
    """

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self.socket = bind("127.0.0.1", 0, settings.write_seconds)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = DrainingServer(app, settings)
        self._thread = threading.Thread(target=self._run, name="minivllm-server", daemon=True)
        self._error: BaseException | None = None

    def _run(self) -> None:
        try:
            self.server.run([self.socket])
        except BaseException as error:  # raised again in `__enter__`
            self._error = error

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        while not self.server.started:
            self._thread.join(0.01)
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start; its log says why") from self._error
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join()
