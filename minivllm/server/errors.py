"""Error responses in OpenAI's format, and which status each error has.

Stands for vllm/entrypoints/serve/utils/error_response.py (v0.22.1).
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from minivllm.errors import AllPinned, EngineDeadError, IsLeaving
from minivllm.server import refusals
from minivllm.serving.async_llm import Draining, QueueFull

MOST_CHARACTERS = 500
COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `json.dumps` makes one for every call

# Status -> the type that vLLM and OpenAI give, where it is not made of the status' phrase.
KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    429: "RateLimitError",
    500: "InternalServerError",
}

# Errors whose message is for the client -> status; the first that fits.
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
    """An error response.

    status   of HTTP
    param    the field of the request's body that is wrong
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


REPORTED = (ApiError, *STATUSES)  # errors whose message the client gets


class Json(JSONResponse):
    """JSON of any text: a lone surrogate, which UTF-8 cannot encode, stays escaped."""

    def render(self, content: Any) -> bytes:
        return encode(content)


def encode(content: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return COMPACT.encode(content).encode("utf-8", "backslashreplace")


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format, with vLLM's types."""
    kind = KINDS.get(status, HTTPStatus(status).phrase.replace(" ", "") + "Error")
    shown = message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - 1] + "…"
    return {"error": {"message": shown, "type": kind, "param": param, "code": status}}


def error_response(status: int, message: str, param: str | None = None) -> Json:
    """An error as a response, with `retry-after` where the client may retry."""
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(error_body(status, message, param), status, headers)


def response_of(error: Exception) -> Json:
    """The response to a request that raised one of `REPORTED`."""
    return error_response(status_of(error), str(error), getattr(error, "param", None))


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for one that is not in `REPORTED`."""
    if isinstance(error, ApiError):
        return error.status
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)


async def on_reported(request: Request, error: Exception) -> Json:
    return response_of(error)


async def on_http_exception(request: Request, error: HTTPException) -> Json:
    """Starlette raises it for an unknown path, or another method of a path."""
    sentence = str(error.detail)
    if error.status_code == 404:
        sentence = refusals.of_path(request.url.path, [route.path for route in request.app.routes])
    response = error_response(error.status_code, sentence)
    response.headers.update(error.headers or {})  # the methods that are allowed
    return response


async def on_failure(request: Request, error: Exception) -> Json:
    """For a handler with a bug; Starlette raises the error again, and uvicorn logs it."""
    return error_response(500, "the server failed at this request; its log says why")


# For Starlette, which looks an error's classes up from the most derived one on.
HANDLERS = {
    HTTPException: on_http_exception,
    Exception: on_failure,
    **dict.fromkeys(REPORTED, on_reported),
}
