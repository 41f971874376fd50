"""The access log: a record of each HTTP request and its line in the log.

Stands for uvicorn's access log and vllm/entrypoints/logger.py (v0.22.1).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.engine.metrics import RequestMetrics
from minivllm.server.errors import error_response

logger = logging.getLogger("minivllm.access")
# Monitors ask all the time: a line only where the answer was no.
QUIET = frozenset({"/health", "/ping", "/metrics"})
REQUEST_ID = b"x-request-id"


@dataclass
class Record:
    """What has happened in one HTTP request so far.

    model           the base model or an adapter, as the request calls it; None where it names none
    prompt_tokens, completion_tokens   of all its prompts and answers so far
    first_token_at  on the clock of `started`
    """

    started: float = field(default_factory=time.monotonic)
    model: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None
    status: int = 0

    def note_first_token(self, times: RequestMetrics | None, now: float) -> None:
        """Tokens have come, now. The engine's metrics have the time of the first one, if it keeps them."""
        if self.first_token_at is None:
            seconds = times.time_to_first_token if times is not None else None
            self.first_token_at = now if seconds is None else times.arrival_time + seconds

    def line(self, scope: Scope, ended: float) -> str:
        """The line in the log. Text of the client is quoted, so that it cannot begin a line of its own."""
        client = scope.get("client") or ("-", 0)
        parts = [f"{client[0]} {scope['method']} {scope['path']!a} {self.status or 'gone'}"]
        if self.model is not None:
            parts.append(f"model={self.model[:100]!a}")
            parts.append(f"prompt={self.prompt_tokens} answer={self.completion_tokens}")
        parts += [f"id={value.decode('latin-1')!a}" for name, value in scope["headers"] if name == REQUEST_ID]
        if self.first_token_at is not None:
            parts.append(f"ttft={self.first_token_at - self.started:.3f}s")
        return " ".join([*parts, f"total={ended - self.started:.3f}s"])


class AccessLog:
    """A middleware: gives every HTTP request its `Record`, and logs a line when it has ended.

    A request's header X-Request-Id goes back with the response, and into the line. vLLM: `--enable-request-id-headers`.

    A request that is cancelled gets 503, and no traceback in the log. Only a server that is forced to end cancels
    requests from outside. If the response has begun, the connection is closed.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic, logs: bool = True) -> None:
        self.app, self.clock, self.logs = app, clock, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        record = scope.setdefault("state", {})["record"] = Record(self.clock())

        ids = [(name, value) for name, value in scope["headers"] if name == REQUEST_ID]

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if ids:
                    message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        except asyncio.CancelledError:
            if not record.status:
                await error_response(503, "the server has ended")(scope, receive, note_status)
        finally:
            is_quiet = scope["path"] in QUIET and record.status < 400
            if self.logs and not is_quiet and logger.isEnabledFor(logging.INFO):
                logger.info("%s", record.line(scope, self.clock()))
