"""Prompts of one HTTP request on their way through the engine. Stands for a part of vLLM's OpenAIServing (v0.22.1)."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Literal, TypeVar

from minivllm.engine.input_processor import Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.server.metrics import Progress, ServerMetrics
from minivllm.server.record import Record
from minivllm.serving.async_llm import AsyncLLM

T = TypeVar("T")
Kind = Literal["delta", "final"]


class Generation:
    """Answers to the prompts of one HTTP request, all by one adapter.

    model        as the client calls it
    adapter      as the engine takes it
    request_id   the first prompt's is `request_id-0` to the engine
    record       is told of all tokens
    check_served   is asked when the engine refuses a prompt: the model may have been unloaded meanwhile
    """

    def __init__(
        self,
        llm: AsyncLLM,
        metrics: ServerMetrics,
        record: Record,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        model: str,
        adapter: LoRARequest | str | None,
        check_served: Callable[[], None],
    ) -> None:
        self.llm, self.metrics, self.record = llm, metrics, record
        self.request_id, self.prompts, self.params = request_id, prompts, params
        self.model, self.adapter, self.check_served = model, adapter, check_served

    def outputs(self, kind: Kind) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt's number, its output) as they come: every output, or the last one of each prompt.

        Errors as in `AsyncLLM.generate`. Whoever closes the generator aborts all its requests.
        """
        each = [self._outputs(number, kind) for number in range(len(self.prompts))]
        return each[0] if len(each) == 1 else merged(each)

    async def _outputs(self, number: int, kind: Kind) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt, request_id = self.prompts[number], f"{self.request_id}-{number}"
        progress = Progress(self.metrics, self.record, self.model)
        outputs = self.llm.generate(
            *(prompt, self.params, request_id, self.adapter),
            output_kind=kind,
            on_abort=partial(progress.observe, all_are_seen=False),
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    progress.observe(output, kind == "delta")
                    yield number, output
        except ValueError:
            self.check_served()
            raise
        finally:
            progress.end()


async def merged(generators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What all of them give, as it comes. An error of one is raised here; all are closed at the end, however it comes.

    Each has a task that waits until its item is taken: nothing piles up here.
    """
    queue: asyncio.Queue[tuple[bool, T | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def pump(generator: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    await queue.put((False, item))
            await queue.put((True, None))
        except Exception as error:  # whatever it is, whoever waits must hear of it
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
