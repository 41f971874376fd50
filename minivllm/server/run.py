"""A server in a process, until it is told to end. Stands for vllm/entrypoints/launcher.py (v0.22.1)."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from minivllm.server.connection import LimitedConnection
from minivllm.server.settings import ServerSettings

# For what is in the connections when all requests have ended.
SECONDS_TO_FLUSH = 5
# Likewise, when the server ends at once.
SECONDS_AT_ONCE = 1.0


class DrainingServer(uvicorn.Server):
    """A server that ends in peace: on SIGTERM or Ctrl-C it takes no new requests, and those that run may finish.

    While it does, new requests are answered 503, and so is /health. Then the engine is shut down: a request that is
    left gets an error. A second signal ends the server at once: the engine is killed in the middle of its step, all
    requests get that error, and what has not ended a second later, a client that reads nothing, say, is cut off.
    """

    def __init__(self, app: Starlette, settings: ServerSettings, **options: object) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedConnection.within(settings),
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
        self.state, self.settings = app.state, settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_forced = False
        self._ending: list[asyncio.Task] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal: the loop's thread is in the middle of anything."""
        if self._loop is None:
            super().handle_exit(sig, frame)
        elif not self.state.server.is_draining:
            self.state.server.is_draining = True
            self._loop.call_soon_threadsafe(self._begin, self._drain)
        elif not self._is_forced:
            self._is_forced = True
            self._captured_signals.append(sig)  # so that the process ends by it
            self._loop.call_soon_threadsafe(self._begin, self._end_at_once)

    def drain(self) -> None:
        """As a SIGTERM; from any thread. The second time it is as the second one."""
        self.handle_exit(signal.SIGTERM, None)

    def _begin(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ending.append(asyncio.ensure_future(end()))  # the loop itself does not hold it

    async def _drain(self) -> None:
        try:
            await self.state.llm.drain(self.settings.drain_seconds)
            await asyncio.to_thread(self.state.llm.shutdown)
        finally:
            self.should_exit = True

    async def _end_at_once(self) -> None:
        # Not in a thread of the loop's: all of those may be reading adapters from a disk that does not answer.
        threading.Thread(target=self.state.llm.shutdown, args=(0,), daemon=True).start()
        self.should_exit = True
        await asyncio.sleep(SECONDS_AT_ONCE)
        if tasks := list(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=SECONDS_AT_ONCE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def bind(host: str, port: int, write_seconds: float) -> socket.socket:
    """A socket that listens; OSError says whose place it is. 0 is any free port. ValueError for an empty host.

    write_seconds   after which the system gives up a connection whose reader takes nothing
    """
    if not host:  # to the system that is every address
        raise ValueError("--host must not be empty; leave it out, or pass 0.0.0.0 for every address")
    try:
        found = socket.create_server((host, port), family=_family(host), backlog=1024)
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; pass another {option}"
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * write_seconds))
    return found


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class ServerThread:
    """A server in a thread of this process, for notebooks and tests: `with ServerThread(app, settings) as server:`.

    url   where it listens; a port of its own
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
        except BaseException as error:  # whoever waits in `__enter__` must hear of it
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
