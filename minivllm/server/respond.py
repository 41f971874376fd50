"""From outputs to an HTTP response, whole or as server-sent events. Stands for a part of vllm/entrypoints/openai."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.server.errors import TOLD, ApiError, Json, encode, error_body, status_of
from minivllm.server.forms import Form, usage
from minivllm.server.generation import Generation
from minivllm.serving.listening import unless_gone

Numbered = tuple[int, RequestOutput]

GONE = 499  # in the log, of a client that closed the connection; nginx's number
DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def respond(
    receive: Receive, generation: Generation, form: Form, stream: bool, include_usage: bool = False
) -> Response:
    """The answer to an HTTP request. Whoever closes the connection aborts its requests.

    Errors before the first token are raised, by this function or by the response, which has not begun by then: they
    have a status of their own.
    """
    if stream:
        return EventStream(generation, form, include_usage)
    outputs = await unless_gone(receive, collected(generation))
    return Json(form.whole(outputs)) if outputs is not None else gone()


class EventStream(Response):
    """Server-sent events. It begins with the first output, and what is new of that goes out before anybody else's turn.

    However it ends, the generation does, too.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, form: Form, include_usage: bool) -> None:
        self.status_code, self.background = 200, None
        self.generation, self.form, self.include_usage = generation, form, include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await unless_gone(receive, self._send_all(send)) is None:
            self.generation.record.status = GONE

    async def _send_all(self, send: Send) -> bool:
        """True: all is sent."""
        async with aclosing(self.generation.outputs("delta")) as outputs:
            first = await anext(outputs)
            raise_failure(first[1])
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            events = stream_events(first, outputs, self.form, self.generation, self.include_usage)
            async with aclosing(events):
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        return True


async def collected(generation: Generation) -> list[RequestOutput]:
    """The last output of every prompt, in the order of prompts."""
    finals: dict[int, RequestOutput] = {}
    async with aclosing(generation.outputs("final")) as outputs:
        async for number, output in outputs:
            raise_failure(output)
            finals[number] = output
    return [finals[number] for number in range(len(generation.prompts))]


def raise_failure(output: RequestOutput) -> None:
    """ApiError 500 for a request that the engine took and could not answer, 503 for one that it was told to end."""
    if output.error is not None:
        raise ApiError(500, output.error)
    if output.finished and any(answer.finish_reason == "abort" for answer in output.outputs):
        raise ApiError(503, "the request was aborted by the server")


def gone() -> Response:
    """For a connection that is closed; nobody reads it."""
    return Response(status_code=GONE)


async def stream_events(
    first: Numbered,
    rest: AsyncGenerator[Numbered, None],
    form: Form,
    generation: Generation,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: what is new of each answer, as it comes.

    An error in the middle is an event of its own, and the last one before `[DONE]`.
    """
    n, num_prompts = generation.params.n, len(generation.prompts)
    extra = {"usage": None} if include_usage else {}
    finals: dict[int, RequestOutput] = {}
    ended: set[int] = set()
    begun = [choice for index in range(n * num_prompts) if (choice := form.first(index))]
    if begun:
        yield form.event(begun, **extra)
    numbered: Numbered | None = first
    try:
        while numbered is not None:
            number, output = numbered
            finals[number] = output
            raise_failure(output)
            for index, answer in new_answers(output, number * n, ended, form):
                yield form.event([form.delta(index, answer)], **extra)
            numbered = await anext(rest, None)
        if include_usage:
            yield form.event([], usage=usage(list(finals.values())))
    except TOLD as error:
        yield b"data: " + encode(error_body(status_of(error), str(error))) + b"\n\n"
    yield DONE


def new_answers(
    output: RequestOutput, offset: int, ended: set[int], form: Form
) -> list[tuple[int, CompletionOutput]]:
    """(index, answer) of those with something new to say.

    offset   index of the prompt's first answer
    ended    indices of answers that have said why they ended, which is said once
    """
    numbered = [(offset + answer.index, answer) for answer in output.outputs]
    found = [(index, answer) for index, answer in numbered if index not in ended and form.is_news(answer)]
    ended.update(index for index, answer in found if answer.finished())
    return found
