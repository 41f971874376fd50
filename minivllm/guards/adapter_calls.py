"""Calls about adapters while an engine serves. Stands for a part of vllm/v1/engine/llm_engine.py (v0.22.1)."""

from typing import Any

from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.errors import RuntimeRefusal, in_one_sentence, require_kind
from minivllm.guards.guarded_core import GuardedCore
from minivllm.guards.turns import in_turn
from minivllm.lora.request import LoRARequest
from minivllm.lora.seams import name_finders
from minivllm.worker.model_runner import ModelRunner


class AdapterCalls(GuardedCore):
    """What callers ask of the `AdapterRegistry`, each in its turn. RuntimeError for an engine without LoRA.

    Adapters come and go through these calls alone: the runner, and its managers as callers see them, lead here (an
    `AdapterOwner`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.adapters is not None:
            self.runner.serve_for(self)

    @property
    def model_runner(self) -> ModelRunner:
        """Another name of `runner`, which documents about vLLM use."""
        return self.runner

    @in_turn(on_threads=True)
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request. TypeError for what is no LoRARequest. vLLM: `add_lora`."""
        require_kind(LoRARequest, lora_request=lora_request)
        return self._adapters().add_lora(lora_request)

    @in_turn(on_threads=True, refuses=False)
    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter when its requests have finished; new ones are refused. vLLM: `remove_lora`."""
        return self._adapters().remove_lora(lora_id)

    @in_turn(on_threads=True)
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in its slot. vLLM: `pin_lora`."""
        if self._ahead is not None:
            # Whom that leaves without a slot the next step ends, and by then its last token must have been read.
            self._ahead.answer(self._undelivered)
        return self._adapters().pin_lora(lora_id)

    @in_turn(on_threads=True, refuses=False)
    def unpin_lora(self, lora_id: int) -> bool:
        """Let a pinned adapter be evicted again."""
        return self._adapters().unpin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the adapters in memory. vLLM: `list_loras`."""
        return self.runner.list_loras()

    def has_lora(self, lora_id: int) -> bool:
        """Whether requests may name this adapter: it is registered, in memory or not."""
        return lora_id in self._adapters().adapters

    def _adapters(self) -> AdapterRegistry:
        if self.adapters is None:
            raise RuntimeRefusal("LoRA is not enabled. Use enable_lora=True to enable LoRA.")
        return self.adapters

    @in_one_sentence
    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """The tokenizer for an adapter's requests; None is the base model. Errors as in `add_request`."""
        if lora_request is None or self.adapters is None:
            return self.tokenizer
        with self._turns.take():  # an adapter's own is read, and kept
            if isinstance(lora_request, str):
                lora_request = self._named(lora_request)
            return self.input_processor.tokenizer_of(self.adapters.examine(lora_request))

    def _named(self, name: str) -> LoRARequest:
        """The adapter that has this name, or that a resolver finds under it."""
        if known := self.adapters.named(name):
            return known
        [find] = name_finders
        return find(name, self.config.model_config.model, self.adapters.by_name)
