"""What is said of requests that are refused. Stands for messages of vllm/v1/engine/input_processor.py (v0.22.1)."""

from typing import Any

from minivllm.config import ModelConfig
from minivllm.faults import Refusal
from minivllm.sampling_params import SamplingParams
from minivllm.validation import shown


def id_in_use(request_id: str) -> ValueError:
    """Of a request with the id of another one that has not had its last output."""
    return ValueError(f"request id '{request_id}' is in use; give every request its own")


def asks_too_much(
    request_id: str, name: str, params: SamplingParams, model_config: ModelConfig
) -> ValueError:
    """Of more logprobs than the engine gives.   name: of the parameter"""
    return ValueError(
        f"request '{request_id}' asks for {name}={getattr(params, name)}, but max_logprobs is "
        f"{model_config.max_logprobs}; ask for fewer, or start the engine with more (-1 is all)"
    )


def is_no_prompt(request_id: str, prompt: Any) -> ValueError:
    """Of a prompt that is no list where token ids are needed."""
    return ValueError(
        f"request '{request_id}' has {type(prompt).__name__} for a prompt; give text, a list of token "
        'ids, or a dict with "prompt" or "prompt_token_ids"'
    )


def leaves_no_room(request_id: str, num_tokens: int, longest: int, model_config: ModelConfig) -> ValueError:
    """Of a prompt as long as all that prompt and answer may come to (`longest`)."""
    limit = f"the {longest} positions that its adapter, or the base model, was trained for"
    if longest == model_config.max_model_len:
        limit = f"max_model_len {longest}"
    return ValueError(
        f"request '{request_id}' has a prompt of {num_tokens} tokens, which leaves no room for an "
        f"answer in {limit}; shorten it or raise --max-model-len"
    )


def unknown_tokens(request_id: str, wrong: list[Any], vocab_size: int, traits: Any) -> ValueError:
    """Of a prompt with these among its token ids.   traits: of its adapter, which may add tokens (`AdapterTraits`)"""
    whose = f" (adapter '{traits.name}' adds {traits.added_tokens} tokens)" if traits.name else ""
    return ValueError(
        f"request '{request_id}' has prompt token ids {shown(wrong[:5])}; "
        f"use ints from 0 to {vocab_size - 1}{whose}"
    )


def needs_text(request_id: str, params: SamplingParams) -> ValueError:
    """Of an answer that its text gives a structure or an end, where there is no text."""
    what = "structured_outputs, which speak of text,"
    if params.structured_outputs is None:
        what = f"stop strings {shown(params.stop)}, which are looked for in its text,"
    return ValueError(f"request '{request_id}' has {what} but there is no tokenizer; leave them out")


class IsLeaving(Refusal):
    """Of an adapter that is being unloaded: when it is gone, the answer is another one."""


def is_leaving(name: str, adapter_id: int) -> IsLeaving:
    """Of whoever names an adapter that is being unloaded."""
    return IsLeaving(f"adapter '{name}' (id {adapter_id}) is being unloaded; ask again when it is gone")


def is_no_time(request_id: str, arrival_time: Any) -> ValueError:
    """Of an arrival that no clock shows."""
    what = f"arrival_time of request '{request_id}' must be a finite number of seconds, or None"
    return ValueError(f"{what}, got {shown(arrival_time)}")


def lacks_blocks(request_id: str, num_tokens: int, usable: int, block_size: int) -> ValueError:
    """Of a request that, with an empty KV cache all to itself, would still lack blocks."""
    return ValueError(
        f"request '{request_id}' may need {-(-num_tokens // block_size)} KV blocks ({num_tokens} tokens) but "
        f"the cache has {usable}; shorten the prompt, lower max_tokens, or raise num_blocks"
    )


def lora_is_off(request_id: str, lora_name: str) -> ValueError:
    """Of a request that names an adapter to an engine without LoRA."""
    return ValueError(
        f"request '{request_id}' names adapter '{lora_name}' but LoRA is off; start the engine with enable_lora=True"
    )


class AllPinned(Refusal):
    """Of an adapter that can have no slot: when one is unpinned, the answer is another one."""


def all_pinned(lora_name: str, num_pinned: int) -> AllPinned:
    """Of a request whose adapter can have no slot, since all are pinned for others.

    It does not name them: whoever asks a server may not know of any adapter but its own.
    """
    return AllPinned(
        f"adapter '{lora_name}' needs a slot but all {num_pinned} are pinned for others; unpin one or raise max_loras"
    )
