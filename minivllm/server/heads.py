"""A connection's heads: how long one may be, what it may upgrade to, and whether its HTTP knows chunks.

Stands for `--h11-max-incomplete-event-size` of vLLM's server (v0.22.1).
"""

import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedHead(HttpToolsProtocol):
    """One connection. httptools keeps a head until it is whole, however long that is; this one answers 400 and closes.

    A request that offers to go on in another protocol (`Upgrade: h2c`, as Java's client does) is answered in this one.
    httptools gives up such a request behind its head, and uvicorn goes on without the body.

    most   bytes that are read since the last part of a body or the last request, and are neither
    """

    most: int

    @classmethod
    def up_to(cls, most: int) -> type["LimitedHead"]:
        """The class with this limit."""
        return type("LimitedHead", (cls,), {"most": most})

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)
        self._unread = 0

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
