"""Requests in, tokens out, one step at a time. Stands for vllm/v1/engine/llm_engine.py (v0.22.1)."""

from typing import Any

from minivllm.core.request import Request
from minivllm.engine.adapter import BASE
from minivllm.engine.input_processor import Prompt
from minivllm.engine.metrics import EngineReports
from minivllm.engine_args import EngineArgs
from minivllm.errors import lora_is_off
from minivllm.guards.adapter_calls import AdapterCalls
from minivllm.guards.turns import in_turn
from minivllm.lora.request import LoRARequest
from minivllm.observe.recorder import Recorder
from minivllm.sampling_params import SamplingParams
from minivllm.text.prompts import load_tokenizer


class LLMEngine(AdapterCalls, EngineReports):
    """An engine that its caller steps, while requests and adapters come and go. vLLM: `LLMEngine`.

    One thread at a time may call it; another gets a RuntimeError.

    trace   what every step did; without the `listeners` nothing is recorded
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        recorder = Recorder(self)
        self.trace = recorder.trace
        self.listeners.append(recorder)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """Load model and tokenizer. FileNotFoundError and ValueError say what cannot be served."""
        config = args.create_engine_config()
        return cls(config, load_tokenizer(config.model_config), args.warm_up)

    # ---- requests -------------------------------------------------------------------------------------------

    @in_turn()
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
        another kind. EngineDeadError: a rank of the engine has ended. The engine is then as it was.
        """
        self.executor.check()
        self.input_processor.check_arguments(request_id, params, arrival_time, lora_request)
        if lora_request is not None and self.adapters is None:
            raise lora_is_off(request_id, getattr(lora_request, "lora_name", lora_request))
        if isinstance(lora_request, str):
            lora_request = self._named(lora_request)
        traits = BASE if lora_request is None else self.adapters.examine(lora_request)
        text, token_ids, own_params = self.input_processor.process(request_id, prompt, params, traits)
        request = Request(
            request_id,
            token_ids,
            own_params,
            lora_request,
            arrival_time=self.clock() if arrival_time is None else float(arrival_time),
            eos_token_ids=frozenset(self.config.model_config.architecture.eos_token_ids),
        )
        if params.n > 1 or self.parallel.parents or self._undelivered:
            self.parallel.claim(request_id, params.n, self._undelivered)
        if self._ahead is not None:
            self._ahead.check_id(request_id)
        self.scheduler.check_request(request)
        if lora_request is not None:
            self.adapters.check_slots(lora_request)
        parent = self.parallel.new_parent(request) if params.n > 1 else None
        requests = [request] if parent is None else parent.children
        states = [self.output_processor.new_state(own, text, traits.tokenizer) for own in requests]
        # Whatever may be refused has been. From here on the engine changes.
        if lora_request is not None:
            known, generation = self.adapters.register(lora_request, f"request '{request_id}'", traits)
            for own in requests:
                own.lora_request, own.adapter_generation = known, generation
        if parent is not None:
            self.parallel.add(parent)
        for own in requests:
            self.scheduler.add_request(own)
        self.output_processor.add_states(states)
        return request_id
