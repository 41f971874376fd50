"""Tokenizers that adapters bring. vLLM up to 0.10 kept the last ones used, in `TokenizerGroup`."""

from typing import Any

from minivllm.engine.adapter_traits import load_tokenizer
from minivllm.lora.lru_cache import LRUCache
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest


class AdapterTokenizers:
    """Tokenizers that adapters bring. Each takes megabytes, so few are kept: as many as memory has adapters, and one.

    That is enough for the adapters in memory and the last one asked for. Others are read again when they are asked for.
    """

    def __init__(self, manager: LRUCacheLoRAModelManager) -> None:
        self._manager = manager
        self._kept: LRUCache[Any] = LRUCache(manager.capacity + 1)

    def get(self, lora_request: LoRARequest) -> Any | None:
        """The tokenizer of an adapter, None if it brings none; ValueError as in `traits_of`."""
        adapter_id = lora_request.lora_int_id
        if adapter_id not in self._kept:
            self.keep(adapter_id, load_tokenizer(lora_request))
        return self._kept.get(adapter_id)

    def keep(self, adapter_id: int, tokenizer: Any | None) -> None:
        """Keep it for the next requests of the adapter. The first to go is that of an adapter that has left memory."""
        self._kept.put(adapter_id, tokenizer, spare=self._manager.list_adapters())

    def forget(self, adapter_id: int) -> None:
        self._kept.pop(adapter_id)
