"""The ASGI application: middleware, all routes, and the handlers of /health, /version and /metrics.

Stands for `build_app` of vllm/entrypoints/openai/api_server.py and vllm/entrypoints/serve/instrumentator/ (v0.22.1).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

import minivllm
from minivllm.server import adapters, completions, errors, live
from minivllm.server.access_log import AccessLog
from minivllm.server.connection import BufferForHTTP10
from minivllm.server.context import Call, Server
from minivllm.server.errors import ApiError
from minivllm.server.keys import KeyCheck, Keys
from minivllm.server.limits import Limits
from minivllm.server.routes import get, openapi
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM


async def health(call: Call) -> Response:
    """200 while requests are taken; 503 from a SIGTERM on, so that load balancers send no more."""
    if call.server.is_draining:
        raise ApiError(503, "the server is about to end")
    await call.server.llm.check_health()
    return Response(status_code=200)


async def show_version(call: Call) -> dict[str, str]:
    """The version of this package."""
    return {"version": minivllm.__version__}


async def metrics(call: Call) -> Response:
    """All metrics in Prometheus' text format. They name every adapter, so an adapter's key does not open them."""
    call.holder.check_manages()
    text = await call.server.metrics.text(call.server.llm)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# Those of a fleet, whose engine is several: the live page shows one.
FLEET_ROUTES = (
    *(*completions.ROUTES, *adapters.ROUTES),
    *(get("/health", health), get("/ping", health), get("/version", show_version), get("/metrics", metrics)),
)
ROUTES = (*FLEET_ROUTES, *live.ROUTES)


def build_app(llm: AsyncLLM, settings: ServerSettings, routes: Sequence[Route] = ROUTES) -> Starlette:
    """An OpenAI server around an engine. vLLM: `build_app`.

    `app.state.llm` is the engine, `app.state.server` the server's state. When the application starts, it loads the
    adapters of the settings; when it ends, it does not end the engine.
    """
    server = Server.of(llm, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await server.start()
        yield

    @cache
    def described() -> dict[str, Any]:
        return openapi(routes)

    async def describe(call: Call) -> dict[str, Any]:
        return described()

    app = Starlette(
        routes=[*routes, get("/openapi.json", describe)],
        middleware=list(middleware(server, settings)),
        exception_handlers=errors.HANDLERS,
        lifespan=lifespan,
    )
    app.state.llm, app.state.server = llm, server
    return app


def middleware(server: Server, settings: ServerSettings) -> Iterator[Middleware]:
    """From the outermost to the innermost."""
    yield Middleware(AccessLog, logs=settings.log_requests)
    yield Middleware(BufferForHTTP10)
    if settings.allowed_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    yield Middleware(KeyCheck, keys=Keys(settings))
    yield Middleware(Limits, settings=settings, is_draining=lambda: server.is_draining)
