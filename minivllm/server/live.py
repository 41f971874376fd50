"""GET / and /events: a page that shows the engine's steps live. Stands for nothing in vLLM (v0.22.1)."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, suppress
from functools import cache
from statistics import quantiles
from typing import Any

from starlette.responses import HTMLResponse, StreamingResponse

import minivllm
from minivllm.errors import EngineDeadError
from minivllm.observe.page import build_page, run_of
from minivllm.observe.trace import StepRecord
from minivllm.server.context import Call, Server
from minivllm.server.routes import get
from minivllm.serving.calls import newest_steps, step_records

BACKLOG = 200  # steps from before the page was opened
PAUSE = 0.1  # seconds between two events
POLL_SECONDS = 0.5  # between two checks whether the engine has ended
KEEP_ALIVE = (
    20  # after so many checks without a step an empty comment is sent, so that a lost client is noticed
)

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@cache
def live_page() -> str:
    """The page, the same for every server, because what it shows comes from /events."""
    return build_page("minivllm, live", [run_of("live", [])], scripts=["live.js"], live=True)


async def page(call: Call) -> HTMLResponse:
    """The live page, which loads nothing from elsewhere."""
    return HTMLResponse(live_page(), headers=HEADERS)


async def events(call: Call) -> StreamingResponse:
    """Steps from now on, as server-sent events.

    Each event has `steps`, trace records, and `ttft`, see `latencies`. The first one also has `hello`: names and
    capacities. Without clients no step spends any time on this.
    """
    call.holder.check_manages()
    await call.server.llm.check_health()
    headers = {**HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(_messages(call.server), media_type="text/event-stream", headers=headers)


async def _messages(server: Server) -> AsyncIterator[str]:
    idle = 0  # checks since the last step
    async with aclosing(_steps(server)) as batches:
        await anext(batches)  # from here on no step is lost; the page ignores steps that come twice
        steps, room = await server.llm.call(newest_steps, BACKLOG)
        yield message(server, steps, {"room": room, **_names(server)})
        async for batch in batches:
            idle = 0 if batch else idle + 1
            if batch:
                yield message(server, batch)
                await asyncio.sleep(PAUSE)
            elif idle % KEEP_ALIVE == 0:
                yield ": still here\n\n"


async def _steps(server: Server) -> AsyncGenerator[list[StepRecord], None]:
    """Records as they come; an empty list first, and after each POLL_SECONDS without one.

    It ends with the engine, so that a page sees the last requests of a server that drains.
    """
    async with aclosing(server.llm.subscribe(step_records)) as batches:
        coming = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)  # the subscription is in the engine's queue
        try:
            yield []
            while True:
                await server.llm.check_health()
                done, _ = await asyncio.wait([coming], timeout=POLL_SECONDS)
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
    """A server-sent event: one line, because JSON escapes line feeds in names."""
    data = {"steps": list(steps), "ttft": latencies(server.metrics.recent_ttft)}
    if hello is not None:
        data["hello"] = hello
    return f"data: {json.dumps(data, default=_fields)}\n\n"


def _fields(part: Any) -> dict[str, Any]:
    """The fields of a record or a part of one, without `asdict`'s copies."""
    return {name: getattr(part, name) for name in part.__slots__}


def latencies(seconds: Collection[float]) -> dict[str, float | int | None]:
    """Median and 99th percentile of times to the first token, in seconds; None before the first one."""
    if len(seconds) < 2:
        only = next(iter(seconds), None)
        return {"count": len(seconds), "p50": only, "p99": only}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"count": len(seconds), "p50": cuts[49], "p99": cuts[98]}


def _names(server: Server) -> dict[str, Any]:
    settings = server.settings
    return {
        "version": minivllm.__version__,
        "model": settings.model_name,
        "adapters": sorted(server.names.served),
        "may_change": settings.allow_runtime_lora and server.llm.config.lora_config is not None,
        "has_chat": getattr(server.llm.tokenizer, "chat_template", None) is not None,
    }


ROUTES = (get("/", page, is_described=False), get("/events", events, is_described=False))
