"""From a request's body to the engine's parameters. Stands for `to_sampling_params` of vLLM's protocols (v0.22.1)."""

from minivllm.sampling_params import SamplingParams, StructuredOutputsParams
from minivllm.server.protocol import ChatRequest, CompletionRequest, SamplingFields

# Fields that are called alike here and there.
SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens"),
)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """ValueError for what no request may ask."""
    return SamplingParams(**_same(body), max_tokens=body.max_tokens, logprobs=body.logprobs)


def chat_params(body: ChatRequest) -> SamplingParams:
    """As many tokens as there is room for, unless told otherwise."""
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(
        **_same(body), max_tokens=longest, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )


def _same(body: SamplingFields) -> dict[str, object]:
    return {name: getattr(body, name) for name in SAME} | {"structured_outputs": _structure(body)}


def _structure(body: SamplingFields) -> StructuredOutputsParams | None:
    if body.structured_outputs is not None:
        return StructuredOutputsParams(**body.structured_outputs.model_dump(by_alias=True))
    if body.response_format is None or body.response_format.type == "text":
        return None
    if body.response_format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=body.response_format.json_schema.schema_)
