"""From what a caller gives to token ids. Stands for vllm/v1/engine/input_processor.py (v0.22.1)."""

from dataclasses import replace
from typing import Any

from minivllm.config import ModelConfig
from minivllm.engine.adapter import AdapterTraits
from minivllm.guards.refusals import check_prompt
from minivllm.sampling_params import SamplingParams
from minivllm.text.prompts import tokenize

Prompt = str | dict[str, Any] | list[int]


class InputProcessor:
    """Reads prompts, and refuses those that the model, or a request's adapter, cannot take. vLLM: `InputProcessor`.

    tokenizer   None = prompts come as token ids
    """

    def __init__(self, model_config: ModelConfig, tokenizer: Any = None) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer

    def read_prompt(
        self, request_id: str, prompt: Prompt, traits: AdapterTraits
    ) -> tuple[str | None, list[int]]:
        """The prompt's text, where there is one, and its token ids. ValueError for what cannot be served.

        traits   of the request's adapter: how many tokens it adds, and how far it stretches the context
        """
        text, token_ids = None, prompt
        if isinstance(prompt, dict):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, token_ids = prompt, None
        if token_ids is None and isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError(f"request '{request_id}' is text, but there is no tokenizer; give token ids")
            what = f"the prompt of request '{request_id}'"
            token_ids = tokenize(what, text, self.tokenizer_of(traits), self.model_config.max_model_len)
        self._check_prompt(request_id, token_ids, traits)
        return text, list(token_ids)

    def tokenizer_of(self, traits: AdapterTraits) -> Any:
        """The adapter's own where it has one, else the model's; None where prompts come as token ids."""
        return self.tokenizer if traits.tokenizer is None else traits.tokenizer

    def vocab_size(self, traits: AdapterTraits) -> int:
        """V, and the tokens that the adapter adds."""
        return self.model_config.get_vocab_size() + traits.added_tokens

    def longest(self, traits: AdapterTraits) -> int:
        """Tokens, prompt and answer, that a request may come to: positions past the adapter's mean nothing to it."""
        positions = int(self.model_config.architecture.max_position_embeddings * traits.scaling_factor)
        return min(self.model_config.max_model_len, positions)

    def within_context(
        self, params: SamplingParams, prompt_tokens: int, traits: AdapterTraits
    ) -> SamplingParams:
        """The parameters, `max_tokens` lowered to what the context has room for; None is all of that."""
        room = self.longest(traits) - prompt_tokens
        fits = params.max_tokens is not None and params.max_tokens <= room
        return params if fits else replace(params, max_tokens=room)

    def _check_prompt(self, request_id: str, token_ids: Any, traits: AdapterTraits) -> None:
        longest = self.longest(traits)
        limit = f"the {longest} positions that its adapter, or the base model, was trained for"
        if longest == self.model_config.max_model_len:
            limit = f"max_model_len {longest}"
        whose = f" (adapter '{traits.name}' adds {traits.added_tokens} tokens)" if traits.name else ""
        check_prompt(request_id, token_ids, longest, limit, self.vocab_size(traits), whose)
