"""Prompts and chats as text. Stands for a part of vllm/renderers/ (v0.22.1)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from minivllm.config import EngineConfig, ModelConfig
from minivllm.errors import recoverable, shown
from minivllm.lora.request import LoRARequest

# Tokenizer -> characters that one of its tokens can stand for at most.
_longest_tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def tokenize(what: str, text: str, tokenizer: Any, max_model_len: int, **options: Any) -> list[int]:
    """Token ids. ValueError for what is no text, cannot be read, or is longer than any context.

    what      begins the error's sentence
    options   of the tokenizer's call
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is no text: character {error.start} is "
            f"{text[error.start]!a}, half of a pair; decode it as UTF-8 first"
        ) from None
    if len(text) > max_model_len * _longest_token(tokenizer):
        raise ValueError(
            f"{what} has {len(text)} characters, more than max_model_len {max_model_len} allows; shorten it or raise "
            "max_model_len"
        )
    try:
        return tokenizer(text, **options)["input_ids"]
    # A tokenizer may come with an adapter, and what it raises is a matter of this prompt alone.
    except BaseException as error:
        raise ValueError(f"{what} cannot be read by its tokenizer: {shown(recoverable(error))}") from error


def load_tokenizer(model_config: ModelConfig) -> Any:
    """The model's; None where prompts are to come as token ids."""
    if model_config.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_config.model)
    if model_config.chat_template is not None:
        tokenizer.chat_template = model_config.chat_template
    return tokenizer


def _longest_token(tokenizer: Any) -> int:
    if tokenizer not in _longest_tokens:
        _longest_tokens[tokenizer] = max(map(len, tokenizer.get_vocab()), default=1)
    return _longest_tokens[tokenizer]


class TokenizingEngine(Protocol):
    """What is asked of an engine."""

    config: EngineConfig
    tokenizer: Any

    def get_tokenizer(self, lora_request: LoRARequest | str | None) -> Any: ...


def chat_prompts(
    engine: TokenizingEngine,
    conversations: Sequence[list[dict[str, str]]],
    loras: Sequence[LoRARequest | str | None],
) -> list[dict[str, Any]]:
    """A prompt for each conversation, by the tokenizer of its adapter. Errors as in `chat_prompt`."""
    # Only an adapter that adds tokens brings a tokenizer: where none may, none is read, or found by name, to know it.
    lora_config = engine.config.lora_config
    may_add = lora_config is not None and lora_config.lora_extra_vocab_size > 0
    tokenizers = {lora: engine.get_tokenizer(lora if may_add else None) for lora in dict.fromkeys(loras)}
    longest = engine.config.model_config.max_model_len
    return [
        chat_prompt(conversation, tokenizers[lora], engine.tokenizer, longest)
        for conversation, lora in zip(conversations, loras)
    ]


def chat_prompt(
    conversation: list[dict[str, str]],
    tokenizer: Any,
    base_tokenizer: Any,
    max_model_len: int,
    template_options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """A conversation as a prompt: its text and its token ids.

    base_tokenizer     the model's, whose template serves where the tokenizer, an adapter's own, has none
    template_options   `add_generation_prompt`, True by default, and variables of the template

    ValueError for a model without a tokenizer, and for what the chat template cannot take.
    """
    if base_tokenizer is None:
        raise ValueError("a chat needs the tokenizer's template; leave skip_tokenizer_init off")
    template = tokenizer.chat_template or base_tokenizer.chat_template
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            chat_template=template,
            tokenize=False,
            **{"add_generation_prompt": True, **template_options},
        )
    # A template is a program that comes with a model or an adapter: it may raise anything.
    except Exception as error:
        raise ValueError(f"the chat template cannot take this conversation: {error}") from error
    token_ids = tokenize("the conversation", text, tokenizer, max_model_len, add_special_tokens=False)
    return {"prompt": text, "prompt_token_ids": token_ids}
