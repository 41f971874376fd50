"""Errors in OpenAI's form. Stands for vllm/entrypoints/serve/utils/error_response.py (v0.22.1)."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm.errors import AllPinned, IsLeaving
from minivllm.serving.errors import Draining, EngineDeadError, QueueFull

MOST_CHARACTERS = 500
COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `json.dumps` makes one for every call

# Status -> what vLLM calls it.
KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

# What means something to whoever asked -> status; the first that fits.
STATUSES = {
    QueueFull: 429,
    Draining: 503,
    EngineDeadError: 503,
    FileNotFoundError: 404,
    IsLeaving: 409,
    AllPinned: 409,
    ValueError: 400,
}


class ApiError(Exception):
    """An answer that is an error.

    status   of HTTP
    param    the field of the request's body that is to blame
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


TOLD = (ApiError, *STATUSES)  # errors whose sentence whoever asked is told


class Json(JSONResponse):
    """JSON of any text: half a character, which UTF-8 does not have, stays escaped."""

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return COMPACT.encode(content).encode("utf-8", "backslashreplace")


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's form, with vLLM's types."""
    kind = KINDS.get(status, HTTPStatus(status).phrase.replace(" ", "") + "Error")
    shown = message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - 1] + "…"
    return {"error": {"message": shown, "type": kind, "param": param, "code": status}}


def error_response(status: int, message: str, param: str | None = None) -> Json:
    """The whole answer; who may try again later is told when."""
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(error_body(status, message, param), status, headers)


def refusal(error: Exception) -> Json:
    """The answer to a request that met one of `TOLD`."""
    return error_response(status_of(error), str(error), getattr(error, "param", None))


def status_of(error: Exception) -> int:
    """What an error means to whoever asked."""
    if isinstance(error, ApiError):
        return error.status
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)


async def answer_http(request: Request, error: HTTPException) -> Json:
    """Where no route is, or another method."""
    answered = error_response(error.status_code, str(error.detail))
    answered.headers.update(error.headers or {})  # which methods there are
    return answered


async def answer_unknown(request: Request, error: Exception) -> Json:
    """Where a handler failed."""
    return error_response(500, "the server failed at this request; its log says why")


HANDLERS = {HTTPException: answer_http, Exception: answer_unknown}


class CutOff:
    """Answers the requests that a server cuts off when it ends; else uvicorn would log a traceback for each.

    Nobody else cancels a request from outside. One whose answer has begun has no second one: its connection is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            if not scope["state"]["record"].status:
                await error_response(503, "the server has ended")(scope, receive, send)
