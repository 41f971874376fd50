"""What of an adapter its requests depend on; its own tokenizer, as `get_lora_tokenizer` of vLLM up to 0.10 had it."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.faults import as_fault
from minivllm.lora.limits import TOKENIZER_BYTES, TOKENIZER_CONFIG_BYTES
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.request import LoRARequest
from minivllm.lora.sentences import LONGEST_NAME, one_sentence
from minivllm.text.detokenizer import fast_backend
from minivllm.validation import is_real

# What transformers looks for beside a tokenizer, be it the model's.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")
TOKENIZER_CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


class AdapterTraits(NamedTuple):
    """What of an adapter its requests' prompts depend on.

    scaling_factor   of the rotary embedding: the positions it was trained for, in multiples of the base model's
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

    ValueError names the adapter if it brings a tokenizer that cannot be read.
    """
    scaling_factor, added_tokens = numbers_of(lora)
    tokenizer = load_tokenizer(lora_request) if with_tokenizer and added_tokens else None
    return AdapterTraits(scaling_factor, added_tokens, tokenizer, lora_request.lora_name)


def numbers_of(lora: LoRAModel) -> tuple[float, int]:
    """`scaling_factor` and `added_tokens` of an adapter."""
    return lora.beside.get("scaling_factor", 1.0), lora.beside.get("added_tokens", 0)


def load_tokenizer(lora_request: LoRARequest) -> Any | None:
    """The tokenizer in an adapter's folder, None where there is none. No code that the folder brings is run."""
    folder = get_adapter_absolute_path(lora_request.lora_path)
    if not Path(folder, "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        _refuse_large_files(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        fast_backend(tokenizer)
        _refuse_what_cannot_encode(tokenizer)
    # The tokenizers library raises nothing narrower, and a panic of its Rust is no Exception.
    except BaseException as error:
        as_fault(error)
        name = one_sentence(lora_request.lora_name, LONGEST_NAME)
        raise ValueError(
            one_sentence(f"adapter '{name}': the tokenizer in '{folder}' cannot be read: {error}")
        ) from error
    return tokenizer


def _refuse_large_files(folder: str) -> None:
    """ValueError names a file that transformers would read with the tokenizer, if it is too large or no plain file."""
    templates = Path(folder, "additional_chat_templates").glob("*.jinja")
    for path in (*(Path(folder, name) for name in (*VOCABULARIES, *TOKENIZER_CONFIGS)), *templates):
        if not os.path.lexists(path):
            continue
        if not path.is_file():
            raise ValueError(f"{path.name} is no plain file")
        most = TOKENIZER_BYTES if path.name in VOCABULARIES else TOKENIZER_CONFIG_BYTES
        if (size := path.stat().st_size) > most:
            raise ValueError(f"{path.name} has {size} bytes, at most {most} are read")


def _refuse_what_cannot_encode(tokenizer: Any) -> None:
    """A tokenizer may be read, and yet fail at its first text."""
    longest = tokenizer.model_max_length
    if not is_real(longest):
        raise ValueError(f"model_max_length must be a number, got {longest!r}")
    tokenizer("a")
