"""Routes: the body of a request is parsed for its handler, whose result becomes the response.

Stands for FastAPI, which vLLM 0.22.1 uses. Its routing, dependencies and parsing of bodies took more processor time
than all the rest of a request (docs/serving-measured.md).
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minivllm.server import refusals
from minivllm.server.context import Call
from minivllm.server.errors import ApiError, Json
from minivllm.server.limits import read_body
from minivllm.server.protocol import Body

# Of the body, if the route has one, and the call. A result that is no response is sent as JSON.
Handler = Callable[..., Awaitable[Any]]


def get(path: str, handler: Handler, is_described: bool = True) -> Route:
    """A route whose handler gets the call.   is_described: in /openapi.json"""
    return Route(
        path, Endpoint(handler), methods=["GET"], name=handler.__name__, include_in_schema=is_described
    )


def post(path: str, kind: type[Body], handler: Handler) -> Route:
    """A route whose handler gets the body and the call."""
    return Route(path, Endpoint(handler, kind), methods=["POST"], name=handler.__name__)


class Endpoint:
    """The ASGI application of one route.   kind: the model of the body; None = it is not read

    Errors of handlers are Starlette's to answer (`errors.HANDLERS`).
    """

    def __init__(self, handler: Handler, kind: type[Body] | None = None) -> None:
        self.handler, self.kind = handler, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope, receive)
        if self.kind is None:
            result = await self.handler(call)
        else:
            headers = dict(scope["headers"])
            content = await read_body(receive, headers.get(b"content-length", b""), call.server.settings)
            if content is None:
                return
            body = parse(self.kind, content, headers.get(b"content-type", b""))
            result = await self.handler(body, call)
        response = result if isinstance(result, Response) else Json(result)
        await response(scope, receive, send)


def parse(kind: type[Body], content: bytes, declared: bytes) -> Body:
    """A body that is declared as JSON. ApiError 400 names the first field that is wrong."""
    # A page of any origin may send text/plain without a CORS preflight.
    if declared.partition(b";")[0].strip().lower() != b"application/json":
        raise ApiError(
            400, "the body is not declared as JSON; send it with the header content-type: application/json"
        )
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ApiError(400, *_first_problem(error)) from None


def _first_problem(error: ValidationError) -> tuple[str, str | None]:
    """A sentence about the first field that is wrong, and its name."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":  # also more than 200 levels of nesting
        return f"the body is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}", None
    field = ".".join(map(str, first["loc"]))[:100] or None
    if sentence := refusals.of_field(field):
        return sentence, field
    if first["type"] == "extra_forbidden":
        return f"'{field}' is not supported by this server; leave it out", field
    return f"{field or 'the body'}: {first['msg'].removeprefix('Value error, ')}", field


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The routes and their bodies as an OpenAPI document."""
    endpoints = [(route, route.endpoint) for route in routes if route.include_in_schema]
    kinds = dict.fromkeys((each.kind, "validation") for _, each in endpoints if each.kind)
    refs, schemas = models_json_schema(list(kinds), ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for route, endpoint in endpoints:
        path = route.path_format
        about: dict[str, Any] = {
            "summary": endpoint.handler.__doc__,
            "responses": {"200": {"description": "OK"}},
        }
        if names := list(route.param_convertors):
            about["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if endpoint.kind is not None:
            content = {"application/json": {"schema": refs[endpoint.kind, "validation"]}}
            about["requestBody"] = {"required": True, "content": content}
        method = "get" if endpoint.kind is None else "post"
        paths.setdefault(path, {})[method] = about
    info = {"title": "minivllm", "version": "1"}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }
