"""Requests in, tokens out, one step at a time. Stands for vllm/v1/engine/llm_engine.py and core.py (v0.22.1)."""

from minivllm.labs import Todo
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus, lora_is_off
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_names import resolve_lora
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.adapter_traits import BASE
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.recorder import record_step
from minivllm.engine.trace import Trace
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.worker.model_runner import ModelRunner


class LLMEngine:
    """Scheduler, model runner and outputs, stepped by the caller. vLLM: `LLMEngine` (with `EngineCore` in it).

    tokenizer   a transformers fast tokenizer; None = prompts come as token ids and answers have no text
    trace       what every step did
    """

    def __init__(self, config: EngineConfig, tokenizer: Any = None, warm_up: bool = True) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = ModelRunner(config)
        if warm_up:
            self.runner.warm_up()
        self.scheduler = Scheduler(
            config.scheduler_config,
            replace(config.cache_config, num_blocks=self.runner.num_blocks),
            config.lora_config,
            max_model_len=config.model_config.max_model_len,
            adapter_identity=self._adapter_identity,
            pinned_adapters=self._pinned_adapters,
            can_prefetch=self.runner.can_prefetch_lora,
        )
        self.adapters = None
        if config.lora_config is not None:
            self.adapters = AdapterRegistry(
                self.scheduler, self.runner, with_tokenizers=tokenizer is not None
            )
        self.input_processor = InputProcessor(config.model_config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics()
        self.trace = Trace(capacity=10_000, max_bytes=64 * 2**20)
        self._started = time.monotonic()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """Load model and tokenizer. FileNotFoundError and ValueError say what cannot be served."""
        config = args.create_engine_config()
        tokenizer = None
        if not config.model_config.skip_tokenizer_init:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(config.model_config.model)
        return cls(config, tokenizer, args.warm_up)

    def _adapter_identity(self, adapter_id: int) -> int | None:
        """A number that stands for the weights behind an id right now; None while they are not in memory."""
        lora = self.adapters.manager.get_adapter(adapter_id)
        return lora and lora.load_id

    def _pinned_adapters(self) -> set[int]:
        return self.adapters.pinned_adapters() if self.adapters else set()

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

        Raises ValueError (FileNotFoundError for an adapter that is not there, TypeError for an argument of another
        kind) for what can never be served; the engine is then as it was.
        """
        _check_types(request_id, params, lora_request)
        if lora_request is not None and self.adapters is None:
            raise lora_is_off(request_id, getattr(lora_request, "lora_name", lora_request))
        lora_request = self._resolved(lora_request)
        traits = BASE if lora_request is None else self.adapters.examine(lora_request)
        text, token_ids = self.input_processor.read_prompt(request_id, prompt, traits)
        params.verify_with_vocab(self.input_processor.vocab_size(traits))
        request = Request(
            request_id,
            token_ids,
            self.input_processor.within_context(params, len(token_ids), traits),
            lora_request,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            eos_token_ids=frozenset(self.config.model_config.architecture.eos_token_ids),
        )
        self.scheduler.check_request(request)
        if lora_request is not None:
            self._refuse_if_all_pinned(lora_request)
            request.lora_request, request.adapter_generation = self.adapters.resolve(
                lora_request, f"request '{request_id}'", traits
            )
        self.scheduler.add_request(request)
        self.output_processor.add_request(request, text, traits.tokenizer)
        return request_id

    def _resolved(self, lora_request: LoRARequest | str | None) -> LoRARequest | None:
        if not isinstance(lora_request, str):
            return lora_request
        return resolve_lora(lora_request, self.config.model_config.model, self.adapters.by_name)

    def _refuse_if_all_pinned(self, lora_request: LoRARequest) -> None:
        pinned = self._pinned_adapters()
        if len(pinned) >= self.config.lora_config.max_loras and lora_request.lora_int_id not in pinned:
            names = ", ".join(f"'{self.adapters.name_of(adapter_id)}'" for adapter_id in sorted(pinned))
            raise ValueError(
                f"adapter '{lora_request.lora_name}' needs a slot but all {len(pinned)} are pinned ({names}); "
                "unpin one or raise max_loras"
            )

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without an output; unknown and finished ids are passed over."""
        for request in self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED):
            self._forget(request)
            self.output_processor.drop(request.request_id)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return len(self.scheduler.requests)

    # ---- one step -------------------------------------------------------------------------------------------

    # region lab 7.4: one step of the engine
    def step(self) -> list[RequestOutput]:
        """Schedule, run, sample; what is new of every request that got a token or ended. vLLM: the same name.

        First reloads and unloads are settled (`_settle_adapters`), then the scheduler decides. The output
        processor hears who was admitted (`mark_scheduled`), and the refused are finished (`_finish`). A step in
        which nothing is scheduled ends here.

        Then the adapters are read (`_prepare_adapters`). Requests whose adapter cannot be loaded end with
        finish_reason "error", and the step is dropped with them: the others go on with the next one.

        Between the launch and the sampling of what was launched the step is recorded (`_record`) and the
        adapters of `prefetch` are copied. Only when the tokens are there is anything committed:
        `update_from_output` takes request id -> [token], and whoever it names gets an output with its logprobs.
        `metrics.observe_step` counts the step, the seconds from its beginning, and those from launch to tokens.
        """
        raise Todo("lab 7.4: one step of the engine")

    # endregion

    def _settle_adapters(self) -> list[RequestOutput]:
        """Reloads and unloads whose time has come; requests that waited for a reload that failed."""
        if self.adapters is None:
            return []
        outputs = []
        self.adapters.settle()
        # Requests that end here may have stood in the way of the next reload, and that may fail as well.
        while failures := self.adapters.take_failures():
            for (adapter_id, generation), error in failures.items():
                waiting = [
                    request.request_id
                    for request in self.scheduler.requests.values()
                    if (request.adapter_id, request.adapter_generation) == (adapter_id, generation)
                ]
                outputs += self._fail(waiting, error)
        return outputs

    def _prepare_adapters(self, scheduled: SchedulerOutput) -> list[RequestOutput]:
        """Load what the step needs; outputs of the requests whose adapters could not be."""
        if self.adapters is None:
            return []
        self.adapters.pin_wanted()
        wanted = {request.adapter_id: request.lora_request for request in scheduled.running}
        outputs = []
        for adapter_id, error in self.runner.prepare_loras(wanted.values()).items():
            users = [r.request_id for r in self.scheduler.requests.values() if r.adapter_id == adapter_id]
            outputs += self._fail(users, error)
            self.adapters.release_unused(adapter_id)
        return outputs

    def _fail(self, request_ids: list[str], error: Exception) -> list[RequestOutput]:
        requests = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR, str(error))
        return [self._finish(request) for request in requests]

    def _finish(self, request: Request, logprobs: dict | None = None) -> RequestOutput:
        """A request's output, and the end of it if this is the end."""
        output = self.output_processor.process(request, logprobs)
        if output.finished:
            # A stop string is found in the text, so the scheduler does not know of it yet.
            self.scheduler.finish_requests(request.request_id, request.status)
            self._forget(request)
        return output

    def _forget(self, request: Request) -> None:
        self.runner.forget_request(request.request_id)
        self.metrics.observe_finished(request.status.finish_reason)
        if request.adapter_id:
            self.adapters.request_ended(request.adapter_id)

    def _record(self, scheduled: SchedulerOutput, now: float) -> None:
        self.trace.append(
            record_step(self.metrics.steps, now - self._started, scheduled, self.scheduler, self.adapters)
        )

    # ---- adapters -------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request. vLLM: `add_lora`."""
        return self._adapters().add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter when its requests have finished; new ones are refused. vLLM: `remove_lora`."""
        return self._adapters().remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in its slot. vLLM: `pin_lora`."""
        return self._adapters().pin_lora(lora_id)

    def unpin_lora(self, lora_id: int) -> bool:
        """Let a pinned adapter be evicted again."""
        return self._adapters().unpin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the adapters in memory. vLLM: `list_loras`."""
        return self.runner.list_loras()

    def _adapters(self) -> AdapterRegistry:
        if self.adapters is None:
            raise RuntimeError("LoRA is not enabled. Use enable_lora=True (--enable-lora) to enable LoRA.")
        return self.adapters

    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """What requests of an adapter are read and written by; None is the base model. Errors as in `add_request`."""
        if lora_request is None or self.adapters is None:
            return self.tokenizer
        return self.input_processor.tokenizer_of(self.adapters.examine(self._resolved(lora_request)))

    # ---- looking inside -------------------------------------------------------------------------------------

    def get_metrics(self) -> dict[str, object]:
        """All counters as plain values."""
        lora = self.adapters.manager.stats if self.adapters else None
        return self.metrics.snapshot(self.scheduler.make_stats(), lora)

    def debug_info(self) -> dict[str, object]:
        """Everything worth knowing when something looks wrong: counters, slots, memory, adapters, queues."""
        info: dict[str, object] = {
            "metrics": self.get_metrics(),
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "kv_blocks": self.runner.num_blocks,
            "kv_bytes": self.runner.num_blocks * self.runner.kv_block_bytes,
        }
        if self.adapters is not None:
            manager = self.adapters.manager
            info |= {
                "slots": list(manager.lora_index_to_id),
                "free_slots": manager.get_free_slots(),
                "active_adapters": dict(manager.list_active_adapters()),
                "pinned": sorted(self.adapters.pinned_adapters()),
                "memory": manager.get_memory_stats(),
                "adapters": [manager.get_lora_info(adapter_id) for adapter_id in manager.list_adapters()],
            }
        return info


def _check_types(request_id: str, params: SamplingParams, lora_request: LoRARequest | str | None) -> None:
    for name, value, kind in (
        ("request_id", request_id, str),
        ("params", params, SamplingParams),
        ("lora_request", lora_request, LoRARequest | str | None),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {getattr(kind, '__name__', kind)}, got {value!r}")
