"""The asynchronous engine that a server calls. Stands for `AsyncLLM` of vllm/v1/engine/async_llm.py (v0.22.1)."""

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
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
from minivllm.progress import Listener
from minivllm.sampling_params import SamplingParams
from minivllm.serving.adapter_reader import PARALLEL_READS
from minivllm.serving.batching import BatchingExecutor
from minivllm.serving.calls import Function, Subscribe, adapter_events, is_leaving, update_lora
from minivllm.serving.cancellation import listen
from minivllm.serving.client import SECONDS_TO_STOP, EngineClient, EngineCoreRequest
from minivllm.serving.engine_process import EngineProcess
from minivllm.serving.engine_thread import EngineThread
from minivllm.serving.streams import OutputKind, Stream, aborted, output_stream, wake
from minivllm.sources.by_name import find_by_name
from minivllm.text.prompts import chat_prompt, tokenize

T = TypeVar("T")

# `drain` and `remove_lora` poll every so many seconds until requests have finished.
POLL_SECONDS = 0.02


class QueueFull(RuntimeError):
    """The engine has as many requests as it takes; a client may retry later."""


class Draining(RuntimeError):
    """The engine finishes the requests that it has and takes no new ones."""


class AsyncLLM:
    """An engine in a process or a thread of its own, for callers in event loops. vLLM: `AsyncLLM`.

    No method blocks the loop for a step, a load or a prompt's tokenization. Any loop of any thread may call.

    max_queued          requests that the engine takes in addition to the `max_num_seqs` that run concurrently; None =
                        no limit
    config, tokenizer   the engine's
    """

    def __init__(self, client: EngineClient, *, max_queued: int | None = None) -> None:
        self._client = client
        self.config, self.tokenizer = client.config, client.tokenizer
        self._most = None if max_queued is None else max_queued + self.config.scheduler_config.max_num_seqs
        self._open: set[Stream] = set()  # of requests that have not finished
        self._is_draining = False
        # One thread, because tokenizers are not thread-safe.
        tokenizing = ThreadPoolExecutor(1, thread_name_prefix="minivllm-tokenizer")
        self._tokenizing = BatchingExecutor(tokenizing)
        # Also at the end of the process, which would else cut a thread off in the middle of a step.
        self._stop = weakref.finalize(self, _stop, client, tokenizing)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        max_queued: int | None = None,
        parallel_reads: int = PARALLEL_READS,
        on_progress: Listener | None = None,
        more_calls: Collection[Function] = (),
    ) -> "AsyncLLM":
        """Load model and tokenizer in a process of their own. Blocks until the engine is there.

        parallel_reads   adapters that are read from disk concurrently with steps
        on_progress      is called with (what is loaded, how many are done, of how many); None = a bar on stderr
        more_calls       functions that `call` takes in addition to `CALLS`; they are pickled by name

        Errors as in `LLMEngine.from_engine_args`.
        """
        make_engine = partial(LLMEngine.from_engine_args, engine_args)
        return cls(EngineProcess(make_engine, parallel_reads, on_progress, more_calls), max_queued=max_queued)

    @classmethod
    def from_engine(
        cls, engine: LLMEngine, *, max_queued: int | None = None, parallel_reads: int = PARALLEL_READS
    ) -> "AsyncLLM":
        """Step an engine in a thread of this process. Its caller must not use it any more."""
        return cls(EngineThread(engine, parallel_reads), max_queued=max_queued)

    @property
    def adapter_names(self) -> Collection[str]:
        """Names of the adapters that the engine knows; none when it has ended."""
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

        A slow consumer gets fewer: `output_stream` says how outputs of each kind are merged. Closing the generator, or
        cancelling its task, aborts the request. `on_abort` then gets the last output, which has no consumer any more:
        all tokens so far, with finish_reason "abort".

        Before the request is added: errors as in `LLMEngine.add_request`; `Draining`; `QueueFull`; `EngineDeadError`,
        which ends a running request, too. A request that fails has finish_reason "error" and the reason in `.error`.
        """
        self._check_room()
        arrival_time = self._client.clock()
        stream = output_stream(asyncio.get_running_loop(), output_kind)

        async def begin() -> None:
            lora = await self._resolved(lora_request)
            tokenized = await self._tokenized(request_id, prompt, lora)
            request = EngineCoreRequest(request_id, tokenized, sampling_params, arrival_time, lora)
            self._client.begin(stream, request)

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
        """Abort requests: their consumers get a last output with finish_reason "abort". vLLM: `abort`."""
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
        # Only adapters that add tokens have a tokenizer of their own.
        lora_config = self.config.lora_config
        if lora_request is None or lora_config is None or not lora_config.lora_extra_vocab_size:
            return self.tokenizer
        return await self.call(LLMEngine.get_tokenizer, await self._resolved(lora_request))

    async def tokenize(
        self,
        what: str,
        text: str,
        lora_request: LoRARequest | str | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text. ValueError for a text that no request may have; `what` begins its sentence."""
        tokenizer = await self.get_tokenizer(lora_request)
        longest = self.config.model_config.max_model_len
        return await self.run_in_tokenizer_thread(
            partial(tokenize, what, text, tokenizer, longest, add_special_tokens=add_special_tokens)
        )

    async def chat_prompt(
        self,
        conversation: list[dict[str, str]],
        lora_request: LoRARequest | str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate`. ValueError for one that the chat template refuses.

        template_options   as in `minivllm.text.prompts.chat_prompt`
        """
        tokenizer = await self.get_tokenizer(lora_request)
        longest = self.config.model_config.max_model_len
        function = partial(
            chat_prompt, conversation, tokenizer, self.tokenizer, longest, template_options or {}
        )
        return await self.run_in_tokenizer_thread(function)

    async def run_in_tokenizer_thread(self, function: Callable[[], T]) -> T:
        """Run a function of tokenizers in their thread, concurrently with steps and the loop.

        EngineDeadError when the engine has ended. A function that waits by then is run all the same.
        """
        await self.check_health()
        return await self._tokenizing.run(function)

    async def _tokenized(
        self, request_id: str, prompt: Prompt, lora_request: LoRARequest | str | None
    ) -> Prompt:
        """A prompt of text with its token ids; any other as it is, because the engine checks it."""
        is_dict = isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None
        text = prompt.get("prompt") if is_dict else prompt
        if not isinstance(text, str) or self.tokenizer is None:
            return prompt
        ids = await self.tokenize(f"the prompt of request '{request_id}'", text, lora_request)
        return {"prompt": text, "prompt_token_ids": ids}

    async def _resolved(self, lora_request: LoRARequest | str | None) -> LoRARequest | str | None:
        """The adapter of a name that the engine does not know, which the resolvers of this process find.

        They read disks and networks, so they run in a thread. ValueError if none finds it.
        """
        is_name = isinstance(lora_request, str) and self.config.lora_config is not None
        if not is_name or lora_request in self.adapter_names:
            return lora_request
        model = self.config.model_config.model
        return await asyncio.to_thread(find_by_name, lora_request, model, self.adapter_names)

    # ---- adapters -------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLMEngine.add_lora`, and read concurrently with steps.

        A reload of an adapter in use waits until its requests have finished.
        """
        require_kind(LoRARequest, lora_request=lora_request)
        try:
            if read := await asyncio.wrap_future(self._client.read_ahead(lora_request)):
                await asyncio.wrap_future(read)
            return await self.call(LLMEngine.add_lora, lora_request)
        finally:
            self._client.end_ahead(lora_request)

    async def update_lora(
        self, adapter: str | int, weights: Mapping[str, Any] | str | os.PathLike[str], **options: Any
    ) -> int:
        """As `LLMEngine.update_lora`; the engine's next step waits until the weights are packed."""
        return await self.call(update_lora, adapter, weights, options)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter, and return when it is in no slot and not in memory. False for an unknown id.

        Its requests finish first, and new ones are refused. Cancelling this call does not cancel the unload.
        """
        removed = await self.call(LLMEngine.remove_lora, lora_id)
        while await self.call(is_leaving, lora_id):
            await asyncio.sleep(POLL_SECONDS)
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
        """The result of `function(engine, *args)`, which the engine's thread runs between two steps; the next step
        waits for it.

        To an engine in another process the function is sent by its name, and has to be one that `EngineProcess` takes;
        arguments and result are pickled.
        EngineDeadError when the engine has ended. A call that is cancelled while it is in the queue is never run.
        """
        return await asyncio.wrap_future(self._client.call(function, *args))

    async def subscribe(self, events: Subscribe, most: int = 256) -> AsyncGenerator[list[Any], None]:
        """Events of the engine as they happen: all since the last item, but no more than the `most` newest.

        events   the kind: `step_records` or `adapter_events` of minivllm.serving.calls

        Without subscribers no step spends any time on this. vLLM has none.
        """
        stream: Stream[list[Any]] = Stream(
            asyncio.get_running_loop(), lambda earlier, later: (earlier + later)[-most:]
        )

        def listener(event: Any) -> None:
            if stream.put([event]):
                wake([stream])

        try:
            await asyncio.wrap_future(self._client.subscribe(events, listener))
            while True:
                yield await stream.take()
        finally:
            self._client.unsubscribe(listener)

    async def watch_adapters(self, listener: Callable[[LoRAEvent], object]) -> None:
        """Call a listener, in another thread, with each event of adapters from now on. vLLM has none."""
        await asyncio.wrap_future(self._client.subscribe(adapter_events, listener))

    async def check_health(self) -> None:
        """EngineDeadError when the engine has ended. vLLM: `check_health`."""
        if self._client.error is not None:
            raise self._client.error

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait until the others have finished, at most so many seconds."""
        self._is_draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._open and loop.time() < until:
            await asyncio.sleep(POLL_SECONDS)

    def shutdown(self, timeout: float = SECONDS_TO_STOP) -> None:
        """End the engine after its current step; requests that have not finished get an EngineDeadError.

        timeout   seconds until an engine in another process is killed; 0 is at once
        """
        self._client.stop(timeout)
        self._stop()


def _stop(client: EngineClient, tokenizing: ThreadPoolExecutor) -> None:
    client.stop()
    tokenizing.shutdown(
        wait=False
    )  # without cancelling its calls, because that would cancel the tasks that await them
