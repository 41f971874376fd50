"""A limit of what a connection may send that is no body. vLLM: `--h11-max-incomplete-event-size` (v0.22.1)."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedHead(HttpToolsProtocol):
    """One connection. httptools keeps a head until it is whole, however long that is; this one answers 400 and closes.

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
        self._unread += len(data)
        super().data_received(data)
        if self._unread > self.most and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()
