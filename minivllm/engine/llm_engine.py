"""Requests in, tokens out, one step at a time. Stands for vllm/v1/engine/llm_engine.py (v0.22.1)."""

from collections.abc import Iterable
from typing import Any

from minivllm.core.request import Request, RequestStatus
from minivllm.engine.adapter import BASE
from minivllm.engine.input_processor import Prompt
from minivllm.engine.metrics import EngineReports
from minivllm.engine.recorder import Recorder
from minivllm.engine_args import EngineArgs
from minivllm.guards.adapter_calls import AdapterCalls
from minivllm.guards.refusals import check_arguments, check_slots, lora_is_off
from minivllm.guards.turns import in_turn
from minivllm.lora.request import LoRARequest
from minivllm.lora.seams import name_finders
from minivllm.sampling_params import SamplingParams
from minivllm.sentences import in_one_sentence


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
        tokenizer = None
        if not config.model_config.skip_tokenizer_init:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(config.model_config.model)
        return cls(config, tokenizer, args.warm_up)

    # ---- requests -------------------------------------------------------------------------------------------

    @in_one_sentence
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

        Raises ValueError (FileNotFoundError for an adapter that is not there, TypeError for an argument of another
        kind) for what can never be served; the engine is then as it was.
        """
        check_arguments(request_id, params, arrival_time, lora_request, self.config.model_config.max_logprobs)
        if lora_request is not None and self.adapters is None:
            raise lora_is_off(request_id, getattr(lora_request, "lora_name", lora_request))
        lora_request = self._identified(lora_request)
        traits = BASE if lora_request is None else self.adapters.examine(lora_request)
        text, token_ids = self.input_processor.read_prompt(request_id, prompt, traits)
        params.verify_with_vocab(self.input_processor.vocab_size(traits))
        request = Request(
            request_id,
            token_ids,
            self.input_processor.within_context(params, len(token_ids), traits),
            lora_request,
            arrival_time=self.clock() if arrival_time is None else float(arrival_time),
            eos_token_ids=frozenset(self.config.model_config.architecture.eos_token_ids),
        )
        if params.n > 1 or self.parallel.parents:
            self.parallel.claim(request_id, params.n, self._undelivered)
        self.scheduler.check_request(request)
        if lora_request is not None:
            check_slots(lora_request, self.adapters.pinned, self.config.lora_config, self.adapters.name_of)
            request.lora_request, request.adapter_generation = self.adapters.register(
                lora_request, f"request '{request_id}'", traits
            )
        if params.n > 1:
            self.parallel.add(request, text, traits.tokenizer)
        else:
            self.queue(request, text, traits.tokenizer)
        return request_id

    def knows(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not had its last output."""
        return self.parallel.is_in_use(request_id, self._undelivered)

    def _identified(self, lora_request: LoRARequest | str | None) -> LoRARequest | None:
        if not isinstance(lora_request, str):
            return lora_request
        if known := self.adapters.named(lora_request):
            return known
        [find] = name_finders
        return find(lora_request, self.config.model_config.model, self.adapters.by_name)

    @in_turn()
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without an output; unknown and finished ids are passed over."""
        parents = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ids = self.parallel.ids_within(parents)
        for request_id in ids:
            # First: whom the output processor does not know is not brought back after a Ctrl-C.
            self.output_processor.drop(request_id)
        for request in self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED):
            self._forget(request)
        self._settle_what_was_left()
        self._undelivered = [o for o in self._undelivered if o.request_id not in ids]
        self.parallel.forget(parents)
        if not self.has_unfinished_requests():
            self._failed_steps = 0  # whatever fails next is somebody else's

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, or to tell."""
        return bool(self.output_processor.states or self._undelivered)

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.states)

    @in_one_sentence
    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """The tokenizer for an adapter's requests; None is the base model. Errors as in `add_request`."""
        if lora_request is None or self.adapters is None:
            return self.tokenizer
        with self._turns.take():  # an adapter's own is read, and kept
            return self.input_processor.tokenizer_of(self.adapters.examine(self._identified(lora_request)))
