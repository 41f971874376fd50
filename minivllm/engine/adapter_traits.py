"""What of an adapter its requests depend on; its own tokenizer, as `get_lora_tokenizer` of vLLM up to 0.10 had it."""

from pathlib import Path
from typing import Any, NamedTuple

from minivllm.engine.detokenizer import fast_backend
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.request import LoRARequest


class AdapterTraits(NamedTuple):
    """What of an adapter its requests' prompts depend on.

    scaling_factor   of the rotary embedding: how many times the base model's positions it was trained for
    added_tokens     how many tokens it adds to the vocabulary
    tokenizer        its own, where it adds tokens and brings one; None = the base model's
    name             for people
    """

    scaling_factor: float = 1.0
    added_tokens: int = 0
    tokenizer: Any = None
    name: str = ""


BASE = AdapterTraits()


def traits_of(lora: LoRAModel, lora_request: LoRARequest, with_tokenizer: bool) -> AdapterTraits:
    """The traits of an adapter that was read, at least its shapes.

    with_tokenizer   whether requests may be text

    ValueError that names the adapter for a tokenizer of its own that cannot be read.
    """
    tokenizer = load_tokenizer(lora_request) if with_tokenizer and lora.added_tokens else None
    return AdapterTraits(lora.scaling_factor, lora.added_tokens, tokenizer, lora_request.lora_name)


def load_tokenizer(lora_request: LoRARequest) -> Any | None:
    """The tokenizer in an adapter's folder, None where there is none. No code that the folder brings is run."""
    folder = get_adapter_absolute_path(lora_request.lora_path)
    if not Path(folder, "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        fast_backend(tokenizer)
    # The tokenizers library raises nothing narrower.
    except Exception as error:
        raise ValueError(
            f"adapter '{lora_request.lora_name}': the tokenizer in '{folder}' cannot be read: {error}"
        ) from error
    return tokenizer
