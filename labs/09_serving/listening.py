"""Whoever stops listening ends his request. Stands for the ends of `AsyncLLM.generate` in vllm/v1/engine/async_llm.py,
and for `with_cancellation` around its handlers (v0.22.1).
"""

from labs.kit.overlay import Todo
import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from minivllm.engine.outputs import RequestOutput
from minivllm.serving.client import EngineClient
from minivllm.serving.streams import Stream

T = TypeVar("T")


# region lab 9.3: whoever stops listening
async def listen(
    client: EngineClient,
    stream: Stream[RequestOutput],
    request_id: str,
    begin: Callable[[], Awaitable[None]],
) -> AsyncGenerator[RequestOutput, None]:
    """One request's outputs as they come (`Stream.take`), the last of them `finished`.

    begin   gives the request to the engine, before the first output; its error is raised here

    Whoever stops before the last output, or while `begin` runs, aborts the request: by `aclose`, because its task was
    cancelled, or because nobody holds this generator any more. Then this task may not wait for anything: the abort
    is left with the engine (`EngineClient.abort`). It is that of this stream alone, since another request may have
    the id.
    """
    raise Todo("lab 9.3: whoever stops listening")
    yield


async def unless_gone(
    receive: Callable[[], Awaitable[dict[str, Any]]], coroutine: Coroutine[Any, Any, T]
) -> T | None:
    """The coroutine's result, or what it raises; None when whoever sent the request closes the connection first.

    receive   of ASGI: its next message, `{"type": "http.disconnect"}` once the connection is closed; others before it
              mean nothing. It waits until there is one

    The coroutine runs in this task, so that its request is on its way before another connection's turn. In the end
    nothing runs on, also when this task is cancelled by others, which is raised: what runs is cancelled, and has ended
    when this one does.
    """
    raise Todo("lab 9.3: whoever stops listening")


# endregion
