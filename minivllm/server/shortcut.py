"""From a body to its handler, without a framework between. vLLM 0.22.1 has none: its routes are FastAPI's.

FastAPI's routing, dependencies and reading of bodies take more processor time than all the rest of a request. Requests
that come together wait for each other's.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.server.context import Call, Server
from minivllm.server.errors import TOLD, refusal
from minivllm.server.limits import replayed
from minivllm.server.protocol import Body

JSON = [b"application/json"]

# Path -> what its body has to be, and who answers.
Routes = Mapping[str, tuple[type[Body], Callable[[Any, Call], Awaitable[Response]]]]


class Shortcut:
    """Has requests that are right answered by their handlers. Others go on to FastAPI, which has the same routes: it
    describes them, and refuses what is wrong.

    To be the last before FastAPI: the body has come whole (`Limits`), and who sent it is known (`KeyCheck`).
    """

    def __init__(self, app: ASGIApp, server: Server, routes: Routes) -> None:
        self.app, self.server, self.routes = app, server, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.routes:
            return await self.app(scope, receive, send)
        kind, handler = self.routes[scope["path"]]
        content = (await receive())["body"]
        body = read(kind, content) if is_json(scope) else None
        if body is None:
            return await self.app(scope, replayed(content, receive), send)
        state = scope["state"]
        try:
            response = await handler(body, Call(receive, self.server, state["holder"], state["record"]))
            await response(scope, receive, send)
        except TOLD as error:
            await refusal(error)(scope, receive, send)


def is_json(scope: Scope) -> bool:
    """Whether the body is declared as JSON and nothing more is said of it."""
    return [value for name, value in scope["headers"] if name == b"content-type"] == JSON


def read(kind: type[Body], content: bytes) -> Body | None:
    """As FastAPI reads a body; None for one that is not of this kind."""
    try:
        return kind.model_validate(json.loads(content))
    except (ValueError, RecursionError):
        return None
