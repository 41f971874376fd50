"""GET /health, /version and /metrics. Stands for vllm/entrypoints/serve/instrumentator/ (v0.22.1)."""

from importlib.metadata import PackageNotFoundError, version

from starlette.responses import Response

from minivllm.server.context import Call
from minivllm.server.errors import ApiError
from minivllm.server.routes import get


async def health(call: Call) -> Response:
    """200 as long as requests are taken; 503 before the end, so that nobody sends any more."""
    if call.server.is_draining:
        raise ApiError(503, "the server is about to end")
    await call.server.llm.check_health()
    return Response(status_code=200)


async def show_version(call: Call) -> dict[str, str]:
    """Of this package."""
    try:
        return {"version": version("minivllm")}
    except PackageNotFoundError:  # it runs from a checkout that is not installed
        return {"version": "unknown"}


async def metrics(call: Call) -> Response:
    """For Prometheus, with a key that opens everything: they tell of every adapter."""
    call.holder.check_manages()
    text = await call.server.metrics.text(call.server.llm)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


ROUTES = (get("/health", health), get("/version", show_version), get("/metrics", metrics))
