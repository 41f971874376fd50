"""What one request, and all together, may take. Stands for a part of vllm/entrypoints/openai/server_utils.py.

How long a head may be, and a reader that takes nothing, are the connection's (`connection.py`); how deep JSON may be
nested is the parser's.
"""

import asyncio
from collections.abc import Callable
from itertools import chain

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.server.errors import ApiError, refusal
from minivllm.server.settings import ServerSettings

MOST_HEADERS = 100
# Answered whatever else goes on: whoever watches the server must see it when it is busy.
ALWAYS = frozenset({"/health", "/version", "/metrics"})


class Limits:
    """Refuses what is too much: headers, requests at a time, and any request once the server is about to end.

    is_draining   whether it is
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
            await refusal(error)(scope, receive, send)
        finally:
            self.num_active -= counts

    def _check(self, headers: list[tuple[bytes, bytes]], counts: bool) -> None:
        size = sum(map(len, chain.from_iterable(headers)))
        if len(headers) > MOST_HEADERS or size > self.settings.max_header_bytes:
            raise ApiError(431, f"the request has {len(headers)} headers of {size} bytes; send fewer")
        if counts and self.is_draining():
            raise ApiError(503, "the server is about to end and takes no new requests")
        if counts and self.num_active > self.settings.max_concurrency:
            raise ApiError(429, f"{self.settings.max_concurrency} requests are being served; try again later")


async def read_body(receive: Receive, length: bytes, settings: ServerSettings) -> bytes | None:
    """All of it; None if the sender has gone. ApiError: 413 for one that is too large, 408 for one that comes late.

    length   what the head says of it, if it does
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
