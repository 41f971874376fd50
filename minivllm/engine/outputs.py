"""What the engine gives back. Stands for vllm/outputs.py (v0.22.1)."""

from dataclasses import dataclass, field

from minivllm.engine.metrics import RequestMetrics
from minivllm.layers.sampler import Logprob
from minivllm.lora.request import LoRARequest


@dataclass
class CompletionOutput:
    """One generated text; vLLM's CompletionOutput, with what is new since the last step beside it.

    index               which of the request's n answers it is
    text                everything that may be shown so far, stop strings cut off unless asked for
    token_ids           every generated id, also those whose text a stop string cut off
    cumulative_logprob  None unless `SamplingParams.logprobs` was given
    logprobs            likewise; one dict a token
    finish_reason       None while running, then "stop", "length", "abort" or "error"
    stop_reason         the stop string or stop token id that ended it; None for end-of-sequence
    delta_text          what this step added; the deltas of all steps add up to the whole
    delta_token_ids     likewise
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        """True once nothing more will come."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One request as it stands after a step; vLLM's RequestOutput.

    prompt             None if the request came as token ids
    outputs            `SamplingParams.n` answers, by index
    prompt_logprobs    None unless `SamplingParams.prompt_logprobs` was given; one dict a token, None for the first
    num_cached_tokens  prompt tokens that the prefix cache answered for
    error              why the request failed, if finish_reason is "error"
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None

    @property
    def lora_version(self) -> int | None:
        """Which weights of its adapter it has: see `LoRARequest.version`; None for the base model. vLLM has none."""
        return None if self.lora_request is None else self.lora_request.version
