"""Conversations in the place of prompts. Stands for `chat` in vllm/entrypoints/llm.py (v0.22.1)."""

from collections.abc import Sequence
from typing import Any

from minivllm.engine.outputs import RequestOutput
from minivllm.errors import for_each
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams
from minivllm.serving.shared_engine import SharedEngine
from minivllm.text.prompts import TokenizingEngine, chat_prompts

Params = SamplingParams | Sequence[SamplingParams] | None
LoRAs = LoRARequest | str | Sequence[LoRARequest | str | None] | None


class Chats:
    """Chats for what generates.

    llm_engine   the engine, whose tokenizers have the templates
    _shared      the same, for calls of several threads
    """

    llm_engine: TokenizingEngine
    _shared: SharedEngine

    def chat(
        self,
        messages: list[dict[str, str]] | Sequence[list[dict[str, str]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRAs = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the tokenizer's chat template; otherwise as `generate`.

        The tokenizer is an adapter's own where it adds tokens and brings one; its template, too, if it has any.
        ValueError for an engine without a tokenizer, and for what the template cannot take.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        loras = for_each(lora_request, len(conversations), "lora_request")
        prompts = self._shared.call(lambda engine: chat_prompts(engine, conversations, loras))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """The model's, or that of an adapter's requests."""
        return self._shared.call(lambda engine: engine.get_tokenizer(lora_request))
