"""What no request may be. Stands for the validation in vllm/v1/engine/input_processor.py (v0.22.1)."""

from collections.abc import Callable, Collection
from typing import Any

from minivllm.config import EngineConfig, LoRAConfig
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.validation import is_finite, shown

LONGEST_REQUEST_ID = 1024


def check_arguments(
    request_id: str,
    params: SamplingParams,
    arrival_time: float | None,
    lora_request: LoRARequest | str | None,
    config: EngineConfig,
) -> None:
    """TypeError for an argument of another kind, ValueError for one that no request may have."""
    for name, value, kind in (
        ("request_id", request_id, str),
        ("params", params, SamplingParams),
        ("lora_request", lora_request, LoRARequest | str | None),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {getattr(kind, '__name__', kind)}, got {shown(value)}")
    if len(request_id) > LONGEST_REQUEST_ID or not request_id.isprintable():
        raise ValueError(
            f"request_id must be at most {LONGEST_REQUEST_ID} printable characters, got {shown(request_id)}"
        )
    if arrival_time is not None and not is_finite(arrival_time):
        raise ValueError(
            f"arrival_time of request '{request_id}' must be a finite number of seconds, or None, got "
            f"{shown(arrival_time)}"
        )
    most = config.model_config.max_logprobs  # -1: all
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(params, name) or 0) > most > -1:
            raise ValueError(
                f"request '{request_id}' asks for {name}={wanted}, but max_logprobs is {most}; ask for fewer, or "
                "start the engine with more (-1 is all)"
            )
    if lora_request is not None and config.lora_config is None:
        raise lora_is_off(request_id, getattr(lora_request, "lora_name", lora_request))


def check_prompt(
    request_id: str, token_ids: Any, longest: int, max_model_len: int, vocab_size: int, traits: Any
) -> None:
    """ValueError for what is no list of token ids, empty, or longer than a context that has room for an answer.

    longest      tokens that prompt and answer may come to, `max_model_len` at most
    vocab_size   ids are below it
    traits       of the request's adapter, which may add tokens: `AdapterTraits`
    """
    if not isinstance(token_ids, list | tuple):
        raise ValueError(
            f"request '{request_id}' has {type(token_ids).__name__} for a prompt; give text, a list of token "
            'ids, or a dict with "prompt" or "prompt_token_ids"'
        )
    if not token_ids:
        raise ValueError(f"request '{request_id}' has an empty prompt; give it at least one token")
    if len(token_ids) >= longest:
        limit = f"the {longest} positions that its adapter, or the base model, was trained for"
        if longest == max_model_len:
            limit = f"max_model_len {longest}"
        raise ValueError(
            f"request '{request_id}' has a prompt of {len(token_ids)} tokens, which leaves no room for an "
            f"answer in {limit}; shorten it or raise --max-model-len"
        )
    if wrong := [t for t in token_ids if not (type(t) is int and 0 <= t < vocab_size)]:
        whose = f" (adapter '{traits.name}' adds {traits.added_tokens} tokens)" if traits.name else ""
        raise ValueError(
            f"request '{request_id}' has prompt token ids {shown(wrong[:5])}; "
            f"use ints from 0 to {vocab_size - 1}{whose}"
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """ValueError for token ids outside 0..vocab_size - 1, and for more logprobs than there are tokens."""
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        if unknown := [token_id for token_id in ids if token_id >= vocab_size]:
            raise ValueError(
                f"{name} {unknown} are unknown to this model; use ids from 0 to {vocab_size - 1}"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise ValueError(
                f"{name} is {getattr(params, name)} but the vocabulary has only {vocab_size} tokens"
            )


def lacks_blocks(request_id: str, num_tokens: int, usable: int, block_size: int) -> ValueError:
    """What a request is told that, with an empty KV cache all to itself, would still lack blocks."""
    return ValueError(
        f"request '{request_id}' may need {-(-num_tokens // block_size)} KV blocks ({num_tokens} tokens) but "
        f"the cache has {usable}; shorten the prompt, lower max_tokens, or raise num_blocks"
    )


def lora_is_off(request_id: str, lora_name: str) -> ValueError:
    """What a request is told that names an adapter to an engine without LoRA."""
    return ValueError(
        f"request '{request_id}' names adapter '{lora_name}' but LoRA is off; start the engine with enable_lora=True"
    )


def check_slots(
    lora_request: LoRARequest, pinned: Collection[int], lora_config: LoRAConfig, name_of: Callable[[int], str]
) -> None:
    """ValueError if every slot is pinned for another adapter."""
    if len(pinned) >= lora_config.max_loras and lora_request.lora_int_id not in pinned:
        names = ", ".join(f"'{name_of(adapter_id)}'" for adapter_id in sorted(pinned))
        raise ValueError(all_pinned(lora_request.lora_name, len(pinned), names))


def all_pinned(lora_name: str, num_pinned: int, whose: str) -> str:
    """What a request is told whose adapter can have no slot, since all are pinned for others."""
    return f"adapter '{lora_name}' needs a slot but all {num_pinned} are pinned ({whose}); unpin one or raise max_loras"
