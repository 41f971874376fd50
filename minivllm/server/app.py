"""The application. Stands for `build_app` of vllm/entrypoints/openai/api_server.py (v0.22.1)."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from minivllm.server import adapters, completions, errors, live, monitoring, tokens
from minivllm.server.context import Server
from minivllm.server.heads import WholeAnswers
from minivllm.server.keys import KeyCheck, Keys
from minivllm.server.limits import Limits
from minivllm.server.record import AccessLog
from minivllm.server.settings import ServerSettings
from minivllm.server.shortcut import Shortcut
from minivllm.serving.async_llm import AsyncLLM

# Of a server whose engine is several: the page shows one.
FLEET_ROUTERS = (completions.router, adapters.router, tokens.router, monitoring.router)
ROUTERS = (*FLEET_ROUTERS, live.router)


def build_app(llm: AsyncLLM, settings: ServerSettings, routers: Collection[APIRouter] = ROUTERS) -> FastAPI:
    """An OpenAI server around an engine. vLLM: `build_app`.

    `app.state.llm` is the engine, `app.state.server` the rest. When the application starts, the adapters of the
    settings are read; it does not end the engine.
    """
    server = Server.of(llm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        yield

    app = FastAPI(title="minivllm", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.llm, app.state.server = llm, server
    for router in routers:
        app.include_router(router)
    errors.install(app)
    # The last one that is added sees a request first.
    app.add_middleware(Shortcut, server=server, routes=completions.ROUTES)
    app.add_middleware(Limits, settings=settings, is_draining=lambda: server.is_draining)
    app.add_middleware(KeyCheck, keys=Keys(settings))
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(errors.CutOff)
    app.add_middleware(WholeAnswers)
    app.add_middleware(AccessLog)
    return app
