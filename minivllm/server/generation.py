"""From the prompts of an HTTP request to its response, whole or as server-sent events.

Stands for `OpenAIServingCompletion` and `OpenAIServingChat` of vllm/entrypoints/openai/ (v0.22.1).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.engine.input_processor import Prompt
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.lora.request import AtLeast, LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.server.context import Call
from minivllm.server.errors import REPORTED, ApiError, Json, encode, error_body, status_of
from minivllm.server.formatting import Formatter, usage, version_field, version_header
from minivllm.server.metrics import Progress
from minivllm.server.protocol import SamplingFields, StreamOptions
from minivllm.serving.cancellation import unless_gone

T = TypeVar("T")
Numbered = tuple[int, RequestOutput]  # a prompt's number and one of its outputs

CLIENT_CLOSED = 499  # nginx's status, in the log, of a request whose client closed the connection
DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass
class Generation:
    """The answers to the prompts of one HTTP request, all by one adapter.

    request_id   of the first prompt it is `request_id-0` to the engine
    body         says which version of the adapter will do
    """

    call: Call
    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    adapter: LoRARequest | None
    body: SamplingFields

    def for_engine(self) -> LoRARequest | str | None:
        """The adapter as a request of the engine names it. ApiError 400 for a version of the base model or of a mix."""
        if self.call.is_mixed and self.body.min_lora_version is None:
            return self.adapter
        if self.body.min_lora_version is None:
            return self.call.server.names.for_engine(self.adapter)
        if self.adapter is None or self.call.is_mixed:
            sentence = f"'{self.body.model}' is the base model, which has no versions; leave it out"
            raise ApiError(400, sentence, "min_lora_version")
        return AtLeast(self.adapter.lora_name, self.body.min_lora_version, self.body.lora_version_timeout)

    def outputs(self, kind: Literal["delta", "final"]) -> AsyncGenerator[Numbered, None]:
        """Outputs as they come: every output, or the last one of each prompt.

        Errors as in `AsyncLLM.generate`. Closing the generator aborts all of its requests.
        """
        each = [self._outputs(number, kind) for number in range(len(self.prompts))]
        return each[0] if len(each) == 1 else merged(each)

    async def _outputs(self, number: int, kind: Literal["delta", "final"]) -> AsyncGenerator[Numbered, None]:
        server, model = self.call.server, self.call.record.model
        progress = Progress(server.metrics, self.call.record, model)
        outputs = server.llm.generate(
            *(self.prompts[number], self.params, f"{self.request_id}-{number}"),
            self.for_engine(),
            output_kind=kind,
            on_abort=partial(progress.observe, all_are_seen=False),
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    progress.observe(output, kind == "delta")
                    yield number, output
        except ValueError:
            for name in self.call.asked:
                server.names.check_served(name, self.call.holder)  # it may have been unloaded meanwhile
            raise
        finally:
            progress.end()


async def merged(generators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all generators as they come. An error of one is raised here; all are closed in the end.

    Each generator has a task, which waits until its item is taken, so that no items pile up.
    """
    queue: asyncio.Queue[tuple[bool, T | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def pump(generator: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    await queue.put((False, item))
            await queue.put((True, None))
        except Exception as error:  # of any kind, because the consumer waits
            await queue.put((True, error))

    tasks = [asyncio.create_task(pump(generator)) for generator in generators]
    try:
        left = len(tasks)
        while left:
            is_end, item = await queue.get()
            left -= is_end
            if isinstance(item, BaseException):
                raise item
            if not is_end:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def respond(generation: Generation, formatter: Formatter) -> Response:
    """The response to an HTTP request, which is aborted if the client closes the connection.

    Errors before the first token are raised, by this function or by the response, which has not begun by then, so that
    they have a status of their own.
    """
    if generation.body.stream:
        return EventStream(generation, formatter, generation.body.stream_options or StreamOptions())
    outputs = await unless_gone(generation.call.receive, _last_outputs(generation))
    if outputs is None:
        return Response(status_code=CLIENT_CLOSED)
    return Json(formatter.whole(outputs), headers=version_header(outputs[0]))


async def _last_outputs(generation: Generation) -> list[RequestOutput]:
    """The last output of every prompt, in the order of prompts."""
    finals: dict[int, RequestOutput] = {}
    async with aclosing(generation.outputs("final")) as outputs:
        async for number, output in outputs:
            raise_failure(output)
            finals[number] = output
    return [finals[number] for number in range(len(generation.prompts))]


def raise_failure(output: RequestOutput) -> None:
    """ApiError 500 for a request that failed in the engine, 503 for one that the server aborted, or whose adapter's
    version did not come."""
    if output.error is not None:
        has_begun = output.lora_request is None or output.lora_version is not None
        raise ApiError(500 if has_begun else 503, output.error)
    if output.finished and any(answer.finish_reason == "abort" for answer in output.outputs):
        raise ApiError(503, "the request was aborted by the server")


class EventStream(Response):
    """Server-sent events of what is new in each answer, as it comes. It begins with the first output.

    When it ends, however it does, the generation is closed. An error after the first output is the last event before
    `[DONE]`.
    """

    def __init__(self, generation: Generation, formatter: Formatter, options: StreamOptions) -> None:
        self.generation, self.formatter, self.options = generation, formatter, options
        self._finals: dict[int, RequestOutput] = {}  # by prompt
        self._finished: set[int] = set()  # indices of answers whose finish_reason was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await unless_gone(receive, self._send_all(send)) is None:
            self.generation.call.record.status = CLIENT_CLOSED

    async def _send_all(self, send: Send) -> bool:
        """True: all events were sent."""
        async with aclosing(self.generation.outputs("delta")) as outputs:
            first = await anext(outputs)
            raise_failure(first[1])
            version = [(name.encode(), value.encode()) for name, value in version_header(first[1]).items()]
            await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS, *version]})
            async with aclosing(self._events(first, outputs)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        return True

    async def _events(
        self, first: Numbered, others: AsyncGenerator[Numbered, None]
    ) -> AsyncGenerator[bytes, None]:
        num_answers = self.generation.params.n * len(self.generation.prompts)
        begun = [choice for index in range(num_answers) if (choice := self.formatter.first(index))]
        if begun:
            yield self.formatter.event(begun, **self._usage_so_far())
        numbered: Numbered | None = first
        try:
            while numbered is not None:
                raise_failure(numbered[1])
                for index, answer in self._new_answers(*numbered):
                    more = {**self._usage_so_far(), **version_field(numbered[1])}
                    yield self.formatter.event([self.formatter.delta(index, answer)], **more)
                numbered = await anext(others, None)
            if self.options.include_usage:
                yield self.formatter.event([], usage=usage(list(self._finals.values())))
        except REPORTED as error:
            yield b"data: " + encode(error_body(status_of(error), str(error))) + b"\n\n"
        yield DONE

    def _usage_so_far(self) -> dict[str, Any]:
        """The field `usage` of an event: null where only the last event has it."""
        if not self.options.include_usage:
            return {}
        is_told = self.options.continuous_usage_stats
        return {"usage": usage(list(self._finals.values())) if is_told else None}

    def _new_answers(self, number: int, output: RequestOutput) -> list[tuple[int, CompletionOutput]]:
        """(index among all answers, answer) of the answers with anything to send."""
        self._finals[number] = output
        offset = number * self.generation.params.n
        numbered = [(offset + answer.index, answer) for answer in output.outputs]
        found = [
            (index, answer)
            for index, answer in numbered
            if index not in self._finished and self.formatter.has_event(answer)
        ]
        self._finished.update(index for index, answer in found if answer.finished())
        return found
