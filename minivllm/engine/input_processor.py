"""From what a caller gives to token ids. Stands for vllm/v1/engine/input_processor.py (v0.22.1)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minivllm.config import ModelConfig
from minivllm.errors import is_finite, require_kind, shown
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams
from minivllm.text.prompts import tokenize

Prompt = str | dict[str, Any] | list[int]

LONGEST_REQUEST_ID = 1024


class PromptLimits(NamedTuple):
    """What a prompt may be.

    vocab_size   its token ids are below it
    positions    that there are for it and its answer
    tokenizer    reads it, and writes the answer; None = prompts come as token ids
    adapter_start   gives the first of its tokens that the adapter computes, the base model those before; None = all
    """

    vocab_size: int
    positions: int
    tokenizer: Any = None
    adapter_start: Callable[[Sequence[int]], int] | None = None


# (the base model's, an adapter of which options found something, that) -> the limits of its prompts
LimitsOf = Callable[[PromptLimits, LoRARequest, Mapping[str, Any]], PromptLimits]


def base_limits(base: PromptLimits, lora_request: LoRARequest, found: Mapping[str, Any]) -> PromptLimits:
    """Prompts of adapters are as the base model's."""
    return base


class InputProcessor:
    """Reads prompts, and refuses those that the model, or a request's adapter, cannot take. vLLM: `InputProcessor`.

    tokenizer   None = prompts come as token ids
    base        limits of the base model's prompts, and of a plain adapter's
    limits_of   says those of other adapters
    """

    def __init__(
        self, model_config: ModelConfig, tokenizer: Any = None, limits_of: LimitsOf = base_limits
    ) -> None:
        self.model_config, self.tokenizer, self.limits_of = model_config, tokenizer, limits_of
        model = model_config.architecture
        self.base = PromptLimits(model.vocab_size, model.max_position_embeddings, tokenizer)

    def limits(self, lora_request: LoRARequest, found: Mapping[str, Any]) -> PromptLimits:
        """Of the prompts of an adapter of which options found something.   found: by `AdapterRegistry.examine`"""
        return self.limits_of(self.base, lora_request, found)

    def check_arguments(self, request_id: str, params: Any, arrival_time: Any, lora_request: Any) -> None:
        """TypeError for an argument of another kind, ValueError for one that no request may have.

        vLLM: `_validate_params`.
        """
        require_kind(str, request_id=request_id)
        require_kind(SamplingParams, params=params)
        require_kind(LoRARequest | str | None, lora_request=lora_request)
        if len(request_id) > LONGEST_REQUEST_ID or not request_id.isprintable():
            most = f"at most {LONGEST_REQUEST_ID} printable characters"
            raise ValueError(f"request_id must be {most}, got {shown(request_id)}")
        if arrival_time is not None and not is_finite(arrival_time):
            raise ValueError(
                f"arrival_time of request '{request_id}' must be a finite number of seconds, or None, "
                f"got {shown(arrival_time)}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.model_config.max_logprobs > -1:  # -1: all
                raise ValueError(
                    f"request '{request_id}' asks for {name}={getattr(params, name)}, but max_logprobs is "
                    f"{self.model_config.max_logprobs}; ask for fewer, or start the engine with more (-1 is all)"
                )

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        found: Mapping[str, Any] = {},
    ) -> tuple[str | None, list[int], SamplingParams, Any, int]:
        """The prompt's text, where there is one, its token ids, the parameters, the tokenizer of both ways, and which
        of its tokens is the first that the adapter computes.

        found   what options found of the request's adapter: by `AdapterRegistry.examine`

        `max_tokens` is lowered to what the context has room for; None is all of that. ValueError for what cannot be
        served.
        """
        limits = self.limits(lora_request, found) if found else self.base
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None and isinstance(text, str):
            token_ids = self._tokenize(request_id, text, limits.tokenizer)
        # Positions past the adapter's mean nothing to it.
        longest = min(self.model_config.max_model_len, limits.positions)
        self._check_prompt(request_id, token_ids, longest, limits.vocab_size, lora_request)
        check_sampling(params, limits.vocab_size)
        if self.tokenizer is None and (params.structured_outputs is not None or params.stop):
            what = f"stop strings {shown(params.stop)}, which are looked for in its text,"
            if params.structured_outputs is not None:
                what = "structured_outputs, which speak of text,"
            raise ValueError(f"request '{request_id}' has {what} but there is no tokenizer; leave them out")
        if params.structured_outputs is not None:
            self._check_structure(params.structured_outputs)
        room = longest - len(token_ids)
        if params.max_tokens is None or params.max_tokens > room:
            params = replace(params, max_tokens=room)
        start = limits.adapter_start(token_ids) if limits.adapter_start else 0
        return text, list(token_ids), params, limits.tokenizer, start

    def _check_structure(self, structure: StructuredOutputsParams) -> None:
        """ValueError for a character that no tokens make: not every vocabulary has all bytes."""
        # Choices are escaped there.
        text = structure.guidance + "".join(structure.choice or ())
        for character in sorted(character for character in set(text) if not character.isascii()):
            token_ids = self.tokenizer.encode(character, add_special_tokens=False)
            if self.tokenizer.decode(token_ids) != character:
                raise ValueError(
                    f"the structured outputs have {shown(character)}, which no tokens of the model make; leave it out"
                )

    def _check_prompt(
        self,
        request_id: str,
        token_ids: Any,
        longest: int,
        vocab_size: int,
        lora_request: LoRARequest | None,
    ) -> None:
        """ValueError for what is no list of ids below `vocab_size`, empty, or not shorter than `longest`."""
        if not isinstance(token_ids, list | tuple):
            raise ValueError(
                f"request '{request_id}' has {type(token_ids).__name__} for a prompt; give text, a list of token "
                'ids, or a dict with "prompt" or "prompt_token_ids"'
            )
        if not token_ids:
            raise ValueError(f"request '{request_id}' has an empty prompt; give it at least one token")
        if len(token_ids) >= longest:
            limit = f"the {longest} positions that its adapter, or the base model, was trained for"
            if longest == self.model_config.max_model_len:
                limit = f"max_model_len {longest}"
            raise ValueError(
                f"request '{request_id}' has a prompt of {len(token_ids)} tokens, which leaves no room for an "
                f"answer in {limit}; shorten it or raise --max-model-len"
            )
        if wrong := [t for t in token_ids if not (type(t) is int and 0 <= t < vocab_size)]:
            added, whose = vocab_size - self.base.vocab_size, ""
            if lora_request is not None:
                whose = f" (adapter '{lora_request.lora_name}' adds {added} tokens)"
            raise ValueError(
                f"request '{request_id}' has prompt token ids {shown(wrong[:5])}; "
                f"use ints from 0 to {vocab_size - 1}{whose}"
            )

    def _tokenize(self, request_id: str, text: str, tokenizer: Any) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"request '{request_id}' is text, but there is no tokenizer; give token ids")
        what = f"the prompt of request '{request_id}'"
        return tokenize(what, text, tokenizer, self.model_config.max_model_len)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """ValueError for token ids outside `0..vocab_size - 1`, and for more logprobs than there are tokens."""
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        if unknown := [token_id for token_id in ids if token_id >= vocab_size]:
            usable = f"use ids from 0 to {vocab_size - 1}"
            raise ValueError(f"{name} {unknown} are unknown to this model; {usable}")
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(params, name) or 0) > vocab_size:
            raise ValueError(f"{name} is {wanted} but the vocabulary has only {vocab_size} tokens")
