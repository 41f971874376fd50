"""GET /health, /version and /metrics. Stands for vllm/entrypoints/serve/instrumentator/ (v0.22.1)."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from starlette.responses import Response

from minivllm.server.context import Managing, TheServer
from minivllm.server.errors import ApiError

router = APIRouter()


@router.get("/health")
async def health(server: TheServer) -> Response:
    """200 as long as requests are taken; 503 before the end, so that nobody sends any more."""
    if server.is_draining:
        raise ApiError(503, "the server is about to end")
    await server.llm.check_health()
    return Response(status_code=200)


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Of this package."""
    try:
        return {"version": version("minivllm")}
    except PackageNotFoundError:  # it runs from a checkout that is not installed
        return {"version": "unknown"}


@router.get("/metrics")
async def metrics(server: Managing) -> Response:
    """For Prometheus, with a key that opens everything: they tell of every adapter."""
    text = await server.metrics.text(server.llm)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
