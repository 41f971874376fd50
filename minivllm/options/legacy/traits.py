"""What of an adapter with options its requests' prompts depend on: tokens, tokenizer, length. In vLLM up to 0.10 in
vllm/transformers_utils/tokenizer.py."""

from typing import Any

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.options.legacy.tokenizers import AdapterTokenizers, load_tokenizer


class TraitsReader:
    """Fills in what is not the base model's. `traits` is a tuple with `scaling_factor`, `added_tokens`, `tokenizer`.

    with_tokenizers   whether requests are text
    """

    def __init__(self, manager: LRUCacheLoRAModelManager, with_tokenizers: bool) -> None:
        self.with_tokenizers = with_tokenizers
        self.tokenizers = AdapterTokenizers(manager)
        self._sources = manager.extensions.folder_sources

    def read(self, traits: Any, lora: LoRAModel, lora_request: LoRARequest) -> Any:
        """The traits of an adapter that was read, at least its shapes, with its tokenizer.

        ValueError names the adapter if it brings a tokenizer that cannot be read.
        """
        traits = _of(lora, traits)
        brings_one = self.with_tokenizers and traits.added_tokens
        return traits._replace(tokenizer=load_tokenizer(lora_request, self._sources) if brings_one else None)

    def now(self, traits: Any, lora: LoRAModel | None, lora_request: LoRARequest) -> Any:
        """The traits of an adapter that is known: of what is in memory, if it is."""
        traits = traits if lora is None else _of(lora, traits)
        brings_one = self.with_tokenizers and traits.added_tokens
        return traits._replace(tokenizer=self.tokenizers.get(lora_request) if brings_one else None)

    def keep(self, adapter_id: int, traits: Any) -> Any:
        """The traits without their tokenizer, which is kept here for the adapter's next requests."""
        if self.with_tokenizers and traits.added_tokens:
            self.tokenizers.keep(adapter_id, traits.tokenizer)
        return traits._replace(tokenizer=None)

    def forget(self, adapter_id: int) -> None:
        self.tokenizers.forget(adapter_id)


def _of(lora: LoRAModel, traits: Any) -> Any:
    scaling_factor, added_tokens = lora.beside.get("scaling_factor", 1.0), lora.beside.get("added_tokens", 0)
    return traits._replace(scaling_factor=scaling_factor, added_tokens=added_tokens)
