"""From what a caller gives to token ids. Stands for vllm/v1/engine/input_processor.py (v0.22.1)."""

from dataclasses import replace
from typing import Any

from minivllm.config import ModelConfig
from minivllm.engine.adapter import AdapterTraits
from minivllm.guards.refusals import check_prompt, check_sampling
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

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, traits: AdapterTraits
    ) -> tuple[str | None, list[int], SamplingParams]:
        """The prompt's text, where there is one, its token ids, and the parameters. vLLM: `process_inputs`.

        traits   of the request's adapter: how many tokens it adds, and how far it stretches the context

        `max_tokens` is lowered to what the context has room for; None is all of that. ValueError for what cannot be
        served.
        """
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None and isinstance(text, str):
            token_ids = self._tokenize(request_id, text, traits)
        model = self.model_config.architecture
        vocab_size = model.vocab_size + traits.added_tokens
        # Positions past the adapter's mean nothing to it.
        positions = int(model.max_position_embeddings * traits.scaling_factor)
        longest = min(self.model_config.max_model_len, positions)
        check_prompt(request_id, token_ids, longest, self.model_config.max_model_len, vocab_size, traits)
        check_sampling(params, vocab_size)
        room = longest - len(token_ids)
        if params.max_tokens is None or params.max_tokens > room:
            params = replace(params, max_tokens=room)
        return text, list(token_ids), params

    def _tokenize(self, request_id: str, text: str, traits: AdapterTraits) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"request '{request_id}' is text, but there is no tokenizer; give token ids")
        what = f"the prompt of request '{request_id}'"
        return tokenize(what, text, self.tokenizer_of(traits), self.model_config.max_model_len)

    def tokenizer_of(self, traits: AdapterTraits) -> Any:
        """The adapter's own where it has one, else the model's; None where prompts come as token ids."""
        return self.tokenizer if traits.tokenizer is None else traits.tokenizer
