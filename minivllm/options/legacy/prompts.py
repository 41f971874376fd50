"""What prompts of an adapter with options may be: its tokens, its tokenizer, its context. In vLLM up to 0.10 in
vllm/transformers_utils/tokenizer.py."""

from collections.abc import Mapping
from typing import Any

from minivllm.engine.input_processor import PromptLimits
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.options.legacy.tokenizers import AdapterTokenizers


class AdapterPrompts:
    """`limits_of` of `EngineCore`.

    with_tokenizers   whether requests are text
    """

    def __init__(self, manager: LRUCacheLoRAModelManager, with_tokenizers: bool) -> None:
        self.tokenizers = AdapterTokenizers(manager) if with_tokenizers else None

    def __call__(
        self, base: PromptLimits, lora_request: LoRARequest, found: Mapping[str, Any]
    ) -> PromptLimits:
        """ValueError names the adapter if it brings a tokenizer that cannot be read."""
        added, factor, tokenizer = found.get("added_tokens", 0), found.get("scaling_factor", 1.0), None
        if self.tokenizers is not None and added and found["tokenizer_file"] is not None:
            tokenizer = self.tokenizers.get(lora_request.lora_name, found["tokenizer_file"])
        return base._replace(
            vocab_size=base.vocab_size + added,
            positions=int(base.positions * factor),
            tokenizer=base.tokenizer if tokenizer is None else tokenizer,
        )
