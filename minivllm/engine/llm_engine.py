"""Requests in, tokens out, one step at a time. Stands for vllm/v1/engine/llm_engine.py (v0.22.1)."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.request import Request
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.parts import MakeCore, plain_core
from minivllm.engine_args import EngineArgs
from minivllm.errors import (
    REFUSALS,
    EngineDeadError,
    RuntimeRefusal,
    is_recoverable,
    lora_is_off,
    message_of,
    raise_in_one_sentence,
    require_kind,
)
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.text.prompts import load_tokenizer
from minivllm.worker.model_runner import ModelRunner

ANOTHER_THREAD = (
    "another thread is in a call of this engine, which serves one thread at a time; "
    "call an LLM or an AsyncLLM from several, or hand one thread the others' requests through a queue.Queue"
)
IN_THE_MIDDLE = (
    "this {} was called in the middle of another call, by a signal handler, say; "
    "have the handler set a flag, and call it when the other call has returned"
)


class EngineBusy(RuntimeError):
    """Another thread is in a call of the engine; nothing was done."""


class LLMEngine:
    """An engine that its caller steps, while requests and adapters come and go. vLLM: `LLMEngine`.

    One thread at a time may call it; another gets a RuntimeError. A call that was broken off in the middle of a change,
    by Ctrl-C, say, has ended the engine: each later one raises an EngineDeadError.

    make_core   puts together what it is made of
    core        that; its parts are attributes of the engine, too
    """

    make_core: MakeCore = staticmethod(plain_core)

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Any = None,
        warm_up: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.tokenizer, self.clock = config, tokenizer, clock
        self.core = self.make_core(config, tokenizer, warm_up, clock)
        self.executor, self.runner = self.core.executor, self.core.runner
        self.scheduler, self.adapters = self.core.scheduler, self.core.adapters
        self.input_processor = InputProcessor(config.model_config, tokenizer, self.core.limits_of)
        self.output_processor = self.core.output_processor
        self.metrics, self.listeners = self.core.metrics, self.core.listeners
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that is in a call
        self._changes = False  # whether that call has begun a change that nobody takes back
        self._ended = ""  # why the engine is of no use any more
        if self.adapters is not None:
            self.runner.serve_for(self)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """Load model and tokenizer. FileNotFoundError and ValueError say what cannot be served."""
        config = args.create_engine_config()
        return cls(config, load_tokenizer(config.model_config), args.warm_up)

    @property
    def model_runner(self) -> ModelRunner:
        """Another name of `runner`, which documents about vLLM use."""
        return self.runner

    # ---- requests -------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> str:
        """Queue a request and give its id back. vLLM: `add_request`.

        prompt         text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
        lora_request   an adapter, or the name of one that the engine knows or a resolver finds; None is the base

        ValueError: what can never be served. FileNotFoundError: an adapter that is not there. TypeError: an argument of
        another kind. EngineDeadError: the engine, or a rank of it, has ended. The engine is then as it was.
        """
        with self._one_call():
            if self.executor.error is not None:
                raise self.executor.error
            self.input_processor.check_arguments(request_id, params, arrival_time, lora_request)
            if lora_request is not None and self.adapters is None:
                raise lora_is_off(request_id, getattr(lora_request, "lora_name", lora_request))
            if isinstance(lora_request, str):
                lora_request = self._meant(lora_request)
            elif lora_request is not None and lora_request.lora_int_id in self.adapters.aliases:
                lora_request = self.adapters.newest(lora_request)
            found = {} if lora_request is None else self.adapters.examine(lora_request)
            text, token_ids, own_params, tokenizer, adapter_start = self.input_processor.process(
                request_id, prompt, params, lora_request, found
            )
            request = Request(
                request_id,
                token_ids,
                own_params,
                lora_request,
                arrival_time=self.clock() if arrival_time is None else float(arrival_time),
                eos_token_ids=frozenset(self.config.model_config.architecture.eos_token_ids),
                adapter_start=adapter_start,
            )
            new = self.core.check_request(request, text, tokenizer, found)
            self._changes = True  # whatever may be refused has been
            self.core.add_request(new)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Schedule, run, sample; what is new of every request that got a token or ended. vLLM: the same name.

        What one request or its adapter raises ends that request, with finish_reason "error". What the pass of a whole
        step raises ends the requests of that step.
        """
        with self._one_call(changes=True):
            return self.core.step()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without an output; unknown and finished ids are passed over."""
        ids = dict.fromkeys([request_ids] if isinstance(request_ids, str) else request_ids)
        with self._one_call(changes=True):
            self.core.abort_requests(ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, or to tell."""
        return self.core.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.states)

    def knows(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not had its last output."""
        return self.core.knows(request_id)

    # ---- adapters: RuntimeError for an engine without LoRA -----------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request. TypeError for what is no LoRARequest. vLLM: `add_lora`."""
        require_kind(LoRARequest, lora_request=lora_request)
        with self._one_call(), self.runner.cpu_threads.in_use():
            lora_request = self._registry().newest(lora_request)
            found = self.adapters.examine(lora_request)
            if found:
                self.input_processor.limits(lora_request, found)  # ValueError if its tokenizer cannot be read
            return self.adapters.add_lora(lora_request, found)

    def update_lora(
        self,
        adapter: str | int,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        *,
        peft_config: dict[str, Any] | None = None,
        version: int | None = None,
        running: str = "finish",
    ) -> int:
        """Replace an adapter's weights while requests run; the number of the new version. vLLM has none.

        adapter       its name or id; it was added before
        weights       tensors by PEFT's names, which are copied, or a folder
        peft_config   that goes with tensors; None = as before
        version       its number, greater than that of before; None = one more
        running       what becomes of requests that are under way: "finish" with the weights that they began with,
                      which keep a slot until then, or "restart": what is computed of them is computed anew with the
                      new weights, while tokens that were sampled stay

        ValueError, FileNotFoundError: what cannot be served; RuntimeError: no room in memory. All is then as before.
        """
        with self._one_call(), self.runner.cpu_threads.in_use():
            self._registry()
            return self.core.update_lora(
                adapter, weights, peft_config=peft_config, version=version, running=running
            )

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter when its requests have finished; new ones are refused. vLLM: `remove_lora`."""
        with self._one_call(), self.runner.cpu_threads.in_use():
            return self._registry().remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in its slot. vLLM: `pin_lora`."""
        with self._one_call(), self.runner.cpu_threads.in_use():
            self._registry()
            return self.core.pin_lora(lora_id)

    def unpin_lora(self, lora_id: int) -> bool:
        """Let a pinned adapter be evicted again."""
        with self._one_call():
            return self._registry().unpin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the adapters in memory. vLLM: `list_loras`."""
        return self.runner.list_loras()

    def has_lora(self, lora_id: int) -> bool:
        """Whether requests may name this adapter: it is registered, in memory or not."""
        return self._registry().aliases.get(lora_id, lora_id) in self.adapters.adapters

    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """The tokenizer for an adapter's requests; None is the base model. Errors as in `add_request`."""
        if lora_request is None or self.adapters is None:
            return self.tokenizer
        with self._one_call():  # an adapter's own is read, and kept
            lora_request = self._meant(lora_request)
            found = self.adapters.examine(lora_request)
            return self.input_processor.limits(lora_request, found).tokenizer if found else self.tokenizer

    def _registry(self) -> AdapterRegistry:
        if self.adapters is None:
            raise RuntimeRefusal("LoRA is not enabled. Use enable_lora=True to enable LoRA.")
        return self.adapters

    def _meant(self, lora_request: LoRARequest | str) -> LoRARequest:
        """The adapter as it is now; of a name the one that has it, or that a resolver finds under it."""
        if isinstance(lora_request, str):
            return self.adapters.find(lora_request, self.config.model_config.model)
        return self.adapters.newest(lora_request)

    # ---- one call at a time -----------------------------------------------------------------------------------

    @contextmanager
    def _one_call(self, changes: bool = False) -> Iterator[None]:
        """Around a call. RuntimeError while another is under way, EngineDeadError once one was broken off.

        What is refused, before anything has changed, is refused in one sentence.

        changes   from its first line on whatever is raised may leave the state half old and half new
        """
        if not self._lock.acquire(blocking=False):
            if self._caller == threading.get_ident():
                raise RuntimeError(IN_THE_MIDDLE.format("engine"))
            raise EngineBusy(ANOTHER_THREAD)
        self._caller, self._changes = threading.get_ident(), changes
        try:
            if self._ended:
                raise EngineDeadError(self._ended)
            yield
        except BaseException as error:
            if not self._ended and (self._changes or not is_recoverable(error)):
                why = f"a call of this engine was broken off ({message_of(error)}); make a new engine"
                self._ended = str(error) if isinstance(error, EngineDeadError) else why
            if not self._changes and isinstance(error, REFUSALS):
                raise_in_one_sentence(error)
            raise
        finally:
            self._caller = None
            self._lock.release()
