"""What one request, and all together, may take. Stands for a part of vllm/entrypoints/openai/server_utils.py."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.server.errors import ApiError, error_response
from minivllm.server.settings import ServerSettings

T = TypeVar("T")

MOST_HEADERS = 100
# Lists and objects in each other. Far below where Python gives up, which is sooner the more calls it is in.
MOST_NESTED = 200
STRINGS = re.compile(rb'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)
STEPS = np.zeros(256, dtype=np.int8)  # what each byte adds to how deep JSON is nested, outside of strings
STEPS[[*b"[{"]], STEPS[[*b"]}"]] = 1, -1
# Answered whatever else goes on: whoever watches the server must see it when it is busy.
ALWAYS = frozenset({"/health", "/version", "/metrics"})


class Limits:
    """Reads a request's body whole, within limits, before anybody sees it.

    is_draining   whether the server is about to end, and takes nothing new
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
            self._check(scope, counts)
            body = await self._read(scope, receive)
        except ApiError as error:
            self.num_active -= counts
            return await error_response(error.status, error.message)(scope, receive, send)
        except BaseException:
            self.num_active -= counts
            raise
        try:
            if body is not None:
                await self.app(scope, replayed(body, receive), self._within_time(send))
        finally:
            self.num_active -= counts

    def _check(self, scope: Scope, counts: bool) -> None:
        headers = scope["headers"]
        size = sum(map(len, chain.from_iterable(headers)))
        if len(headers) > MOST_HEADERS or size > self.settings.max_header_bytes:
            raise ApiError(431, f"the request has {len(headers)} headers of {size} bytes; send fewer")
        if counts and self.is_draining():
            raise ApiError(503, "the server is about to end and takes no new requests")
        if counts and self.num_active > self.settings.max_concurrency:
            raise ApiError(429, f"{self.settings.max_concurrency} requests are being served; try again later")
        length = dict(headers).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.settings.max_body_bytes} bytes; send less")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, in time; None if whoever sent it has gone."""
        seconds = self.settings.read_seconds
        try:
            body = await within(seconds, self._read_all(receive))
        except TimeoutError:
            raise ApiError(408, f"the body was not there after {seconds:g} s; send it at once") from None
        if body is not None and nested(body) > MOST_NESTED:
            raise ApiError(400, f"the body is nested more than {MOST_NESTED} levels deep; nest less")
        return body

    async def _read_all(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.settings.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)

    def _within_time(self, send: Send) -> Send:
        """Cuts off whoever reads nothing; OSError, as for a connection that is lost."""

        async def send_soon(message: Message) -> None:
            try:
                await within(self.settings.write_seconds, send(message))
            except TimeoutError:
                raise OSError(f"nothing was read for {self.settings.write_seconds:g} s") from None

        return send_soon


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; TimeoutError when it takes longer. What need not wait, as nearly all, has no timer."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    async with asyncio.timeout(seconds):
        return await Begun(coroutine, waits_for)


@dataclass
class Begun:
    """The rest of a coroutine that was begun and has to wait.

    waits_for   what it yielded to the event loop
    """

    coroutine: Coroutine[Any, Any, Any]
    waits_for: Any

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            yield self.waits_for
            return (yield from self.coroutine.__await__())
        finally:
            self.coroutine.close()


def nested(body: bytes) -> int:
    """At least how deep lists and objects are in each other; exact where JSON is nested more than `MOST_NESTED`."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= MOST_NESTED:
        return 0
    steps = STEPS[np.frombuffer(STRINGS.sub(b"", body), dtype=np.uint8)]
    return int(steps.cumsum(dtype=np.int32).max(initial=0))


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, and then whatever comes: that the sender has gone."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again
