"""Limits on headers, bodies and concurrent requests. Stands for a part of vllm/entrypoints/openai/server_utils.py.

The connection limits the size of a head and cuts off clients that read nothing (`connection.py`); the parser limits the
nesting of JSON.
"""

import asyncio
import re
from collections.abc import Callable
from itertools import chain

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.server.errors import ApiError, response_of
from minivllm.server.settings import ServerSettings

MOST_HEADERS = 100
PORT = re.compile(r":\d*$")
# Always answered, because monitors must see a server that is busy or draining.
ALWAYS = frozenset({"/health", "/ping", "/version", "/metrics"})


class Limits:
    """A middleware: refuses too many headers, hosts that this server is not, too many concurrent requests, and new
    requests of a server that drains.

    is_draining   whether it does
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, is_draining: Callable[[], bool]) -> None:
        self.app, self.settings, self.is_draining = app, settings, is_draining
        self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        counts = scope["path"] not in ALWAYS
        self.num_active += counts
        try:
            self._check(scope["headers"], counts)
            await self.app(scope, receive, send)
        except ApiError as error:
            await response_of(error)(scope, receive, send)
        finally:
            self.num_active -= counts

    def _check(self, headers: list[tuple[bytes, bytes]], counts: bool) -> None:
        size = sum(map(len, chain.from_iterable(headers)))
        if len(headers) > MOST_HEADERS or size > self.settings.max_header_bytes:
            raise ApiError(431, f"the request has {len(headers)} headers of {size} bytes; send fewer")
        self._check_host(headers)
        if counts and self.is_draining():
            raise ApiError(503, "the server is about to end and takes no new requests")
        if counts and self.num_active > self.settings.max_concurrency:
            raise ApiError(429, f"{self.settings.max_concurrency} requests are being served; try again later")

    def _check_host(self, headers: list[tuple[bytes, bytes]]) -> None:
        allowed = self.settings.allowed_hosts
        if not allowed:
            return
        sent = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
        if PORT.sub("", sent).lower() not in allowed:
            raise ApiError(
                403,
                f"this server is not called {sent[:100]!a}; pass --allow-host, or --api-key, at its start",
            )


async def read_body(receive: Receive, length: bytes, settings: ServerSettings) -> bytes | None:
    """The whole body; None if the client closed the connection. ApiError: 413 if it is too large, 408 if it is late.

    length   the value of content-length, empty without one
    """
    most, seconds = settings.max_body_bytes, settings.read_seconds
    size, body, is_more = int(length[:20]) if length.isdigit() else 0, bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while is_more and max(size, len(body)) <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                is_more = message.get("more_body", False)
    except TimeoutError:
        raise ApiError(408, f"the body was not there after {seconds:g} s; send it at once") from None
    if max(size, len(body)) > most:
        raise ApiError(413, f"the body is larger than {most} bytes; send less")
    return bytes(body)
