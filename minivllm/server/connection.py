"""A connection: how long a request's head may be, what it may upgrade to, how long a reader may take nothing, and
whether its HTTP knows chunks.

Stands for `--h11-max-incomplete-event-size` of vLLM's server (v0.22.1). uvicorn has that limit with h11 alone, which
passes over upgrades as well. It takes 74 us for a request and 2.4 for each event of a stream, httptools 20 and 0.5.
"""

import sys
from asyncio import TimerHandle

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minivllm.server.settings import ServerSettings


class LimitedConnection(HttpToolsProtocol):
    """One connection. httptools keeps a head until it is whole, however long that is; this one answers 400 and closes.

    A request that offers to go on in another protocol (`Upgrade: h2c`, as Java's client does) is answered in this one.
    httptools gives up such a request behind its head, and uvicorn goes on without the body.

    most            bytes that are read since the last part of a body or the last request, and are neither
    write_seconds   after which a reader that takes nothing is cut off
    """

    most: int
    write_seconds: float

    @classmethod
    def within(cls, settings: ServerSettings) -> type["LimitedConnection"]:
        """The class with a server's limits."""
        limits = {"most": 2 * settings.max_header_bytes, "write_seconds": settings.write_seconds}
        return type("LimitedConnection", (cls,), limits)

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)
        self._unread = 0
        self._next_check: TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(sys.maxsize)

    def resume_writing(self) -> None:
        self._next_check.cancel()
        super().resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        super().connection_lost(error)

    def _check_reader(self, size: int) -> None:
        """Cut the reader off unless it has taken something.   size: bytes that were left for it the last time"""
        left = self.transport.get_write_buffer_size()
        if left >= size:
            self.transport.abort()
        else:
            self._next_check = self.loop.call_later(self.write_seconds, self._check_reader, left)

    def data_received(self, data: bytes) -> None:
        self._left = data
        while self._left:
            data, self._left = self._left, b""
            self._unread += len(data)
            self._data = data
            super().data_received(data)
        if self._unread > self.most and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def _should_upgrade(self) -> bool:
        """Whether uvicorn leaves the request to `handle_websocket_upgrade`. A tunnel (CONNECT) is none to upgrade."""
        return self.parser.get_method() != b"CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Have the request read again, as one that offers nothing. uvicorn calls this where it caught httptools' word
        for it, which says where the head ended."""
        [end] = sys.exception().args
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.scope["http_version"].encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._left = b"\r\n".join([*lines, b"", self._data[end:]])

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()


class WholeAnswers:
    """A middleware: HTTP/1.0 knows no chunks, so an answer of unknown length is sent when it is whole, with its length.

    uvicorn would send it in chunks.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] != "1.0":
            await self.app(scope, receive, send)
            return
        start: Message = {}
        parts: list[bytes] = []

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = b"".join(parts)
            headers = [header for header in start["headers"] if header[0].lower() != b"content-length"]
            await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, collect)
