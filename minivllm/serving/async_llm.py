"""An engine behind an event loop. Stands for vllm/v1/engine/async_llm.py (v0.22.1)."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from minivllm.assembly import LLMEngine
from minivllm.engine.input_processor import Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.engine_args import EngineArgs
from minivllm.errors import require_kind
from minivllm.lora.events import LoRAEvent
from minivllm.lora.request import LoRARequest
from minivllm.observe.trace import StepRecord
from minivllm.progress import Listener
from minivllm.sampling_params import SamplingParams
from minivllm.serving.adapter_reader import PARALLEL_READS
from minivllm.serving.client import SECONDS_TO_STOP, EngineClient
from minivllm.serving.engine_process import EngineProcess
from minivllm.serving.engine_thread import EngineThread
from minivllm.serving.errors import Draining, QueueFull
from minivllm.serving.listening import listen
from minivllm.serving.streams import OutputKind, Stream, aborted, output_stream, wake
from minivllm.serving.turns import TurnExecutor
from minivllm.serving.views import is_leaving
from minivllm.sources.by_name import find_by_name
from minivllm.text.prompts import chat_prompt, tokenize

T = TypeVar("T")

# Until requests have ended, `drain` and `remove_lora` look every so many seconds.
LOOK_AGAIN = 0.02


class AsyncLLM:
    """An engine in a process or a thread of its own, for callers in event loops. vLLM: `AsyncLLM`.

    No method holds up the loop for a step, a load or a prompt's tokens. Requests come from any loop of any thread.

    max_queued          requests that may be in the engine beside the `max_num_seqs` that can run at once; None = no
                        limit
    config, tokenizer   the engine's
    """

    def __init__(self, client: EngineClient, *, max_queued: int | None = None) -> None:
        self._client = client
        self.config, self.tokenizer = client.config, client.tokenizer
        self._most = None if max_queued is None else max_queued + self.config.scheduler_config.max_num_seqs
        self._open: set[Stream] = set()  # of requests that somebody waits for
        self._is_draining = False
        # One thread: tokenizers are not made for several.
        tokenizing = ThreadPoolExecutor(1, thread_name_prefix="minivllm-tokenizer")
        self._tokenizing = TurnExecutor(tokenizing)
        # It runs at the end of the process, too: a thread in the middle of a step would be cut off.
        self._stop = weakref.finalize(self, _stop, client, tokenizing)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        max_queued: int | None = None,
        parallel_reads: int = PARALLEL_READS,
        on_progress: Listener | None = None,
    ) -> "AsyncLLM":
        """Load model and tokenizer in a process of their own. It blocks until the engine is there.

        parallel_reads   adapters that are read from disk at the same time, beside the steps
        on_progress      is told how far it is: what is done, how many of it, of how many; None = a bar on stderr

        Errors as in `LLMEngine.from_engine_args`.
        """
        make_engine = partial(LLMEngine.from_engine_args, engine_args)
        return cls(EngineProcess(make_engine, parallel_reads, on_progress), max_queued=max_queued)

    @classmethod
    def from_engine(
        cls, engine: LLMEngine, *, max_queued: int | None = None, parallel_reads: int = PARALLEL_READS
    ) -> "AsyncLLM":
        """Take an engine over, which steps in a thread: nobody else may call it from now on."""
        return cls(EngineThread(engine, parallel_reads), max_queued=max_queued)

    @property
    def adapter_names(self) -> Collection[str]:
        """By which the engine knows adapters; none when it has ended."""
        return self._client.adapter_names if self._client.error is None else ()

    # ---- requests -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | str | None = None,
        *,
        output_kind: OutputKind = "delta",
        on_abort: Callable[[RequestOutput], object] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request's outputs as they come, the last of them `finished`. vLLM: `generate`.

        A consumer that is slow gets fewer: `output_stream` says what of several kinds becomes of those between.
        Whoever stops listening, cancelled or not, aborts the request. `on_abort` then gets its last output, which no
        consumer gets any more: all that the request has come to, with finish_reason "abort".

        Before anything runs: errors as in `LLMEngine.add_request`; `Draining`; `QueueFull`; `EngineDeadError`. That
        one ends a running request, too. One that fails has finish_reason "error" and says why in `.error`.
        """
        self._check_room()
        arrival_time = self._client.clock()
        stream = output_stream(asyncio.get_running_loop(), output_kind)

        async def begin() -> None:
            lora = await self._resolved(lora_request)
            read = await self._read(request_id, prompt, lora)
            self._client.begin(stream, request_id, read, sampling_params, arrival_time, lora)

        self._open.add(stream)
        finished = False
        try:
            async with aclosing(listen(self._client, stream, request_id, begin)) as outputs:
                async for output in outputs:
                    finished = output.finished
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            if on_abort is not None and not finished:
                on_abort(aborted(request_id, stream.last))
            raise
        finally:
            self._open.discard(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: whoever listens gets a last output with finish_reason "abort". vLLM: `abort`."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._client.abort(ids))

    def _check_room(self) -> None:
        if self._client.error is not None:
            raise self._client.error
        if self._is_draining:
            raise Draining("the engine is being shut down and takes no new requests; ask another one")
        if self._most is not None and len(self._open) >= self._most:
            raise QueueFull(
                f"{len(self._open)} requests are in the engine, the most that it takes; ask again later or raise "
                "max_queued"
            )

    # ---- prompts --------------------------------------------------------------------------------------------

    async def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """The tokenizer for an adapter's requests; None is the base model. Errors as in `add_request`."""
        # Only an adapter that adds tokens brings a tokenizer.
        lora_config = self.config.lora_config
        if lora_request is None or lora_config is None or not lora_config.lora_extra_vocab_size:
            return self.tokenizer
        return await self.call(LLMEngine.get_tokenizer, await self._resolved(lora_request))

    async def tokenize(
        self, what: str, text: str, lora_request: LoRARequest | str | None = None
    ) -> list[int]:
        """Token ids of a text. ValueError for what no request may have; `what` begins its sentence."""
        tokenizer = await self.get_tokenizer(lora_request)
        longest = self.config.model_config.max_model_len
        return await self.beside(partial(tokenize, what, text, tokenizer, longest))

    async def chat_prompt(
        self, conversation: list[dict[str, str]], lora_request: LoRARequest | str | None = None
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate`. ValueError for what the chat template cannot take."""
        tokenizer = await self.get_tokenizer(lora_request)
        longest = self.config.model_config.max_model_len
        return await self.beside(partial(chat_prompt, conversation, tokenizer, self.tokenizer, longest))

    async def beside(self, function: Callable[[], T]) -> T:
        """Run a function of tokenizers in their thread, beside steps and the loop.

        EngineDeadError when the engine has ended. A function that waits by then is run all the same.
        """
        await self.check_health()
        return await self._tokenizing.run(function)

    async def _read(self, request_id: str, prompt: Prompt, lora_request: LoRARequest | str | None) -> Prompt:
        """The prompt with its token ids, where it is a text that can be read here; others the engine judges."""
        is_dict = isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None
        text = prompt.get("prompt") if is_dict else prompt
        if not isinstance(text, str) or self.tokenizer is None:
            return prompt
        ids = await self.tokenize(f"the prompt of request '{request_id}'", text, lora_request)
        return {"prompt": text, "prompt_token_ids": ids}

    async def _resolved(self, lora_request: LoRARequest | str | None) -> LoRARequest | str | None:
        """The adapter, where it is a name that the engine does not know: resolvers of this process find it.

        They read disks and networks, so they do it beside steps and loop. ValueError if nobody finds it.
        """
        is_name = isinstance(lora_request, str) and self.config.lora_config is not None
        if not is_name or lora_request in self.adapter_names:
            return lora_request
        model = self.config.model_config.model
        return await asyncio.to_thread(find_by_name, lora_request, model, self.adapter_names)

    # ---- adapters -------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLMEngine.add_lora`. A reload that waits for requests is read when they have finished."""
        require_kind(LoRARequest, lora_request=lora_request)
        try:
            if read := await asyncio.wrap_future(self._client.read_ahead(lora_request)):
                await asyncio.wrap_future(read)
            return await self.call(LLMEngine.add_lora, lora_request)
        finally:
            self._client.end_ahead(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter, and return when it has gone from slot and memory. False for an unknown id.

        The requests that use it are finished first, and new ones are refused. Who stops waiting for them takes nothing
        back.
        """
        removed = await self.call(LLMEngine.remove_lora, lora_id)
        while await self.call(is_leaving, lora_id):
            await asyncio.sleep(LOOK_AGAIN)
        return removed

    async def pin_lora(self, lora_id: int) -> bool:
        """As `LLMEngine.pin_lora`."""
        return await self.call(LLMEngine.pin_lora, lora_id)

    async def unpin_lora(self, lora_id: int) -> bool:
        """As `LLMEngine.unpin_lora`."""
        return await self.call(LLMEngine.unpin_lora, lora_id)

    async def list_loras(self) -> set[int]:
        """As `LLMEngine.list_loras`."""
        return await self.call(LLMEngine.list_loras)

    # ---- the engine -----------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(engine, *args)`, which is run where the engine is, between two steps. It holds up
        the steps.

        To an engine in another process the function goes by its name, and has to be one of those that `EngineProcess`
        takes there; arguments and result are copied.
        EngineDeadError when the engine has ended. A call that is cancelled before its turn is never run.
        """
        return await asyncio.wrap_future(self._client.call(function, *args))

    async def subscribe(self, most: int = 256) -> AsyncGenerator[list[StepRecord], None]:
        """The trace records of steps, as they happen: all since the last time, but no more than the `most` newest.

        Without subscribers no step does anything for this. vLLM has none.
        """
        stream: Stream[list[StepRecord]] = Stream(
            asyncio.get_running_loop(), lambda earlier, later: (earlier + later)[-most:]
        )
        listener = partial(_tell, stream)
        try:
            await asyncio.wrap_future(self._client.watch_steps(listener))
            while True:
                yield await stream.take()
        finally:
            self._client.unwatch_steps(listener)

    async def watch_adapters(self, listener: Callable[[LoRAEvent], object]) -> None:
        """Tell a listener of what happens to adapters from now on, in another thread. vLLM has none."""
        await asyncio.wrap_future(self._client.watch_adapters(listener))

    async def check_health(self) -> None:
        """EngineDeadError when the engine has ended. vLLM: `check_health`."""
        if self._client.error is not None:
            raise self._client.error

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait until those there are have ended, at most so many seconds."""
        self._is_draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._open and loop.time() < until:
            await asyncio.sleep(LOOK_AGAIN)

    def shutdown(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the engine after the step that it is in; requests that have not ended get an EngineDeadError.

        timeout   seconds for that step: then an engine in another process is killed; 0 is at once
        """
        self._client.stop(timeout)
        self._stop()


def _tell(stream: Stream[list[StepRecord]], record: StepRecord) -> None:
    if stream.put([record]):
        wake([stream])


def _stop(client: EngineClient, tokenizing: ThreadPoolExecutor) -> None:
    client.stop()
    tokenizing.shutdown(wait=False)  # a call that was cancelled would cancel whoever waits for it
