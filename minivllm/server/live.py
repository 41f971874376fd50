"""GET / and /events: the engine at work, in a browser. Stands for nothing in vLLM (v0.22.1)."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, suppress
from functools import cache
from statistics import quantiles
from typing import Any

from starlette.responses import HTMLResponse, StreamingResponse

from minivllm.observe.trace import StepRecord
from minivllm.server.context import Call, Server
from minivllm.server.page import build_page, run_of
from minivllm.server.routes import get
from minivllm.serving.errors import EngineDeadError
from minivllm.serving.views import newest_steps

BACKLOG = 200  # steps from before a page came
PAUSE = 0.1  # seconds between two messages
LOOK_AGAIN = 0.5  # seconds until a page is given up whose server ends
STILL_HERE = 20  # so many looks without a step: a message that says nothing, so that a lost reader is noticed

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@cache
def live_page() -> str:
    """The same for every server: what a page shows comes from /events."""
    return build_page("minivllm, live", [run_of("live", [])], scripts=["live.js"], live=True)


async def page(call: Call) -> HTMLResponse:
    """One page without anything from elsewhere."""
    return HTMLResponse(live_page(), headers=HEADERS)


async def events(call: Call) -> StreamingResponse:
    """What happens from now on, as server-sent events.

    Each has `steps`, trace records, and `ttft`, see `latencies`. The first one also says what there is: `hello`.
    While nobody reads, no step does anything for it.
    """
    call.holder.check_manages()
    await call.server.llm.check_health()
    headers = {**HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(_messages(call.server), media_type="text/event-stream", headers=headers)


async def _messages(server: Server) -> AsyncIterator[str]:
    looks = 0
    async with aclosing(_steps(server)) as batches:
        await anext(batches)  # from here on no step is lost; a page passes over those that come twice
        steps, there_is = await server.llm.call(newest_steps, BACKLOG)
        yield message(server, steps, {"room": there_is, **_names(server)})
        async for batch in batches:
            looks = 0 if batch else looks + 1
            if batch:
                yield message(server, batch)
                await asyncio.sleep(PAUSE)
            elif looks % STILL_HERE == 0:
                yield ": still here\n\n"


async def _steps(server: Server) -> AsyncGenerator[list[StepRecord], None]:
    """Records as they come; an empty list first, and after each LOOK_AGAIN seconds without one.

    It ends with the engine: a page sees how the last requests of a server that ends are finished.
    """
    async with aclosing(server.llm.subscribe()) as batches:
        coming = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)  # the subscription is on its way to the engine
        try:
            yield []
            while True:
                await server.llm.check_health()
                done, _ = await asyncio.wait([coming], timeout=LOOK_AGAIN)
                if done:
                    batch, coming = coming.result(), asyncio.ensure_future(anext(batches))
                    yield batch
                else:
                    yield []
        except EngineDeadError:
            return
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, EngineDeadError):
                await coming


def message(server: Server, steps: Collection[StepRecord], hello: dict[str, Any] | None = None) -> str:
    """A server-sent event: one line, whatever the names in it are."""
    said = {"steps": list(steps), "ttft": latencies(server.metrics.recent_ttft)}
    if hello is not None:
        said["hello"] = hello
    return f"data: {json.dumps(said, default=_fields)}\n\n"


def _fields(part: Any) -> dict[str, Any]:
    """Of a record or a part of one, which are not copied for this."""
    return {name: getattr(part, name) for name in part.__slots__}


def latencies(seconds: Collection[float]) -> dict[str, float | int | None]:
    """Median and 99th percentile of times to the first token, in seconds; None where there is none yet."""
    if len(seconds) < 2:
        only = next(iter(seconds), None)
        return {"count": len(seconds), "p50": only, "p99": only}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"count": len(seconds), "p50": cuts[49], "p99": cuts[98]}


def _names(server: Server) -> dict[str, Any]:
    settings = server.settings
    return {
        "model": settings.model_name,
        "adapters": sorted(server.names.served),
        "may_change": settings.allow_runtime_lora and server.llm.config.lora_config is not None,
        "has_chat": getattr(server.llm.tokenizer, "chat_template", None) is not None,
    }


ROUTES = (get("/", page, is_described=False), get("/events", events, is_described=False))
