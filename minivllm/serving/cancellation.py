"""Aborts the requests of clients that leave.

Stands for how `AsyncLLM.generate` ends in vllm/v1/engine/async_llm.py, and for `with_cancellation` around the handlers
of vLLM's server (v0.22.1).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from minivllm.engine.outputs import RequestOutput
from minivllm.serving.client import EngineClient
from minivllm.serving.streams import Stream

T = TypeVar("T")


# region lab 9.3: clients that leave
async def listen(
    client: EngineClient,
    stream: Stream[RequestOutput],
    request_id: str,
    begin: Callable[[], Awaitable[None]],
) -> AsyncGenerator[RequestOutput, None]:
    """One request's outputs as they come (`Stream.take`), the last of them `finished`.

    begin   gives the request to the engine, before the first output; its error is raised here

    If this generator ends before the last output, or while `begin` runs, the request is aborted: the consumer calls
    `aclose`, its task is cancelled, or it drops the generator. The abort (`EngineClient.abort`) is not awaited, because
    a task that is being cancelled must not wait for anything. It aborts this stream's request alone, because another
    request may have the id.
    """
    finished = False
    try:
        await begin()
        while not finished:
            output = await stream.take()
            finished = output.finished
            yield output
    finally:
        if not finished:
            client.abort([request_id], stream)


async def unless_gone(
    receive: Callable[[], Awaitable[dict[str, Any]]], coroutine: Coroutine[Any, Any, T]
) -> T | None:
    """The coroutine's result or error; None if the client closes the connection first.

    receive   of ASGI: waits for the next message, which is `{"type": "http.disconnect"}` once the connection is
              closed; messages of other types are ignored

    The coroutine runs in this task, so that its request begins before other connections get the loop. If the
    connection is closed, or this task is cancelled by others (which raises CancelledError), the coroutine is cancelled
    and has finished when this returns.
    """
    task, is_gone = asyncio.current_task(), False

    async def closed() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def end(watch: asyncio.Task[None]) -> None:
        nonlocal is_gone
        is_gone = not watch.cancelled() and task.cancel()

    watch = asyncio.ensure_future(closed())
    watch.add_done_callback(end)
    try:
        return await coroutine
    except asyncio.CancelledError:
        if is_gone and task.cancelling() == 1:  # nobody else wants this task to end
            return None
        raise
    finally:
        watch.remove_done_callback(end)
        if is_gone:
            task.uncancel()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


# endregion
