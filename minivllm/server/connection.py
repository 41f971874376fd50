"""The HTTP/1 connection: limits on a request's head and on slow readers, upgrades, and responses to HTTP/1.0.

Stands for `--h11-max-incomplete-event-size` of vLLM's server (v0.22.1). uvicorn has that limit with h11 alone, which
ignores upgrades as well. h11 takes 74 us for a request and 2.4 for each event of a stream, httptools 20 and 0.5.
"""

import sys
from asyncio import TimerHandle
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minivllm.server.settings import ServerSettings


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits.

    httptools buffers a head until it is complete, however long that is; this one answers 400 and closes.
    A request that offers to upgrade to another protocol (`Upgrade: h2c`, as Java's client does) is answered in this
    one. httptools stops parsing such a request after its head, and uvicorn goes on without the body.

    most            bytes that may be received since the last part of a body or the last request
    write_seconds   after which a client that reads nothing is cut off
    """

    def __init__(self, *args: Any, settings: ServerSettings, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most, self.write_seconds = 2 * settings.max_header_bytes, settings.write_seconds
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
        """Close the connection unless the client has read something.   size: bytes to be sent at the last check"""
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
        """Whether uvicorn calls `handle_websocket_upgrade` for the request. A tunnel (CONNECT) is no upgrade."""
        return self.parser.get_method() != b"CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Parse the request again, without its offer to upgrade. uvicorn calls this where it has caught httptools'
        exception, which holds the place where the head ends."""
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


class BufferForHTTP10:
    """A middleware: HTTP/1.0 has no chunked encoding, so a response without a length is buffered and sent with one.

    uvicorn would send it in chunks.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] != "1.0":
            await self.app(scope, receive, send)
            return
        start: Message | None = None  # of a response without a length
        body = bytearray()

        async def buffer(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                    start = message
                    return
            elif start is not None:
                body.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                length = str(len(body)).encode()
                await send({**start, "headers": [*start["headers"], (b"content-length", length)]})
                message = {"type": "http.response.body", "body": bytes(body)}
            await send(message)

        await self.app(scope, receive, buffer)
