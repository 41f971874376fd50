"""The application. Stands for `build_app` of vllm/entrypoints/openai/api_server.py (v0.22.1)."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from minivllm.server import adapters, completions, errors, live, monitoring, tokens
from minivllm.server.connection import WholeAnswers
from minivllm.server.context import Call, Server
from minivllm.server.keys import KeyCheck, Keys
from minivllm.server.limits import Limits
from minivllm.server.record import AccessLog
from minivllm.server.routes import get, openapi
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM

# Of a server whose engine is several: the page shows one.
FLEET_ROUTES = (*completions.ROUTES, *adapters.ROUTES, *tokens.ROUTES, *monitoring.ROUTES)
ROUTES = (*FLEET_ROUTES, *live.ROUTES)


def build_app(llm: AsyncLLM, settings: ServerSettings, routes: Sequence[Route] = ROUTES) -> Starlette:
    """An OpenAI server around an engine. vLLM: `build_app`.

    `app.state.llm` is the engine, `app.state.server` the rest. When the application starts, the adapters of the
    settings are read; it does not end the engine.
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
    """The first one sees a request first."""
    yield Middleware(AccessLog)
    yield Middleware(WholeAnswers)
    yield Middleware(errors.CutOff)
    if settings.allowed_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    yield Middleware(KeyCheck, keys=Keys(settings))
    yield Middleware(Limits, settings=settings, is_draining=lambda: server.is_draining)
