"""The bodies of requests, and the engine's parameters from them.

Stands for vllm/entrypoints/openai/{completion,chat_completion}/protocol.py (v0.22.1).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from minivllm.engine.input_processor import Prompt
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams

Name = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
NoItems = Annotated[list[Any], Field(max_length=0)]  # what clients send for nothing


def or_else(sentence: str) -> WrapValidator:
    """One sentence for a value that fits none of several types; pydantic has one for each type."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("no_form", sentence) from None

    return WrapValidator(check)


# Fields that `SamplingParams` has under the same names.
SAME_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens"),
)


class Body(BaseModel):
    """A JSON object without unknown fields. A field that is null counts as left out, because clients mean that."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class StreamOptions(Body):
    """continuous_usage_stats: vLLM's; every event has the usage so far"""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A JSON schema. Its name has no effect, and answers always conform to it (`strict`)."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """What the answer has to be: any text, any JSON object, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema and type: "json_schema" need each other')
        return self


class StructuredOutputs(Body):
    """vLLM's own field: exactly one of them; `minivllm.text.structured_outputs` says what each means."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """Fields that completions and chats have in common; `minivllm.sampling_params` says what each means.

    return_token_ids   each choice has its new `token_ids`, too; without a tokenizer a server has no text to return
    lora_mix           names of adapters and the weight of each, in the place of one adapter (`minivllm.mixes`)
    min_lora_version   the adapter's weights are to be of this version or a later one (`AtLeast`): the request waits for
                       it, at most `lora_version_timeout` seconds

    The last ones have no effect. Clients send them, and no answer would be another one without them; values that ask
    for more are refused (`refusals.FIELDS`).
    """

    model: Name
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: Annotated[str | list[str], or_else("must be a text or a list of texts")] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    lora_mix: dict[Name, float] | None = None
    min_lora_version: Annotated[int, Field(ge=0)] | None = None
    lora_version_timeout: Annotated[float, Field(ge=0, le=3600)] = 60.0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    priority: Literal[0] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    use_beam_search: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_options(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream: true")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs and response_format say the same; leave one of them out")
        return self

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        same = {name: getattr(self, name) for name in SAME_FIELDS}
        structure = self._structured_outputs_params()
        return SamplingParams(**same, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structure)

    def _structured_outputs_params(self) -> StructuredOutputsParams | None:
        if self.structured_outputs is not None:
            return StructuredOutputsParams(**self.structured_outputs.model_dump(by_alias=True))
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.response_format.json_schema.schema_)


class CompletionRequest(SamplingFields):
    """POST /v1/completions. prompt: text or token ids, one or several."""

    prompt: Annotated[
        str | list[TokenId] | list[str] | list[list[TokenId]],
        or_else("must be a text, token ids from 0 on, or a list of texts or of lists of token ids"),
    ]
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported; leave one of them out")
        return self

    def prompts(self) -> list[Prompt]:
        """One or several prompts as a list, token ids in the form that the engine takes."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        return [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in given]

    def to_sampling_params(self) -> SamplingParams:
        """ValueError for values that no request may have. vLLM: `to_sampling_params`."""
        return self._sampling_params(self.max_tokens, self.logprobs)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message; parts of text are joined by newlines, as vLLM does for templates that take text."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        str | list[TextPart],
        or_else(
            'must be a text or a list of {"type": "text", "text": ...}; no model here reads anything else'
        ),
    ] = ""
    name: str | None = None
    tool_calls: NoItems | None = None  # this and the next one are in answers that clients send back
    annotations: NoItems | None = None

    def for_template(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        is_text = isinstance(self.content, str)
        text = self.content if is_text else "\n".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions.

    add_generation_prompt   whether the prompt ends with the beginning of an answer
    chat_template_kwargs    variables of the chat template: `enable_thinking`, say

    The last ones are without effect, as those of `SamplingFields` are.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: NoItems | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs: true")
        return self

    def to_sampling_params(self) -> SamplingParams:
        """Without a limit an answer may fill the context. ValueError for values that no request may have."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling_params(limit, (self.top_logprobs or 0) if self.logprobs else None)


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter. vLLM: `LoadLoRAAdapterRequest`.

    lora_version, running   with `load_inplace`: an update, beside the requests that are under way
                            (`LLMEngine.update_lora`); a plain `load_inplace` waits for them
    """

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    lora_version: Annotated[int, Field(ge=1)] | None = None
    running: Literal["finish", "restart"] | None = None

    @model_validator(mode="after")
    def _check_update(self) -> "LoadAdapterRequest":
        if self.is_update and not self.load_inplace:
            raise ValueError("lora_version and running may be given only with load_inplace: true")
        return self

    @property
    def is_update(self) -> bool:
        return self.lora_version is not None or self.running is not None


class AdapterRequest(Body):
    """POST /v1/unload_lora_adapter and those for pins. vLLM: `UnloadLoRAAdapterRequest`, whose id has to fit."""

    lora_name: Name


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: Name
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name
    tokens: list[TokenId]
