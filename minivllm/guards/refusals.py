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
    params.verify_logprobs(f"request '{request_id}'", config.model_config.max_logprobs)
    if lora_request is not None and config.lora_config is None:
        raise lora_is_off(request_id, getattr(lora_request, "lora_name", lora_request))


def check_prompt(
    request_id: str, token_ids: Any, longest: int, limit: str, vocab_size: int, whose: str
) -> None:
    """ValueError for what is no list of token ids, empty, or longer than a context that has room for an answer.

    longest      tokens that prompt and answer may come to; `limit` says who set that
    vocab_size   ids are below it; `whose` says whose they are, "" for the base model's
    """
    if not isinstance(token_ids, list | tuple):
        raise ValueError(
            f"request '{request_id}' has {type(token_ids).__name__} for a prompt; give text, a list of token "
            'ids, or a dict with "prompt" or "prompt_token_ids"'
        )
    if not token_ids:
        raise ValueError(f"request '{request_id}' has an empty prompt; give it at least one token")
    if len(token_ids) >= longest:
        raise ValueError(
            f"request '{request_id}' has a prompt of {len(token_ids)} tokens, which leaves no room for an "
            f"answer in {limit}; shorten it or raise --max-model-len"
        )
    if wrong := [t for t in token_ids if not (type(t) is int and 0 <= t < vocab_size)]:
        raise ValueError(
            f"request '{request_id}' has prompt token ids {shown(wrong[:5])}; "
            f"use ints from 0 to {vocab_size - 1}{whose}"
        )


def lacks_blocks(request_id: str, num_blocks: int, num_tokens: int, usable: int) -> ValueError:
    """What a request is told that, with an empty KV cache all to itself, would still lack blocks."""
    return ValueError(
        f"request '{request_id}' may need {num_blocks} KV blocks ({num_tokens} tokens) but "
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
