"""The LoRA side of a model runner. Stands for vllm/v1/worker/lora_model_runner_mixin.py (v0.22.1)."""

import numpy as np
import torch
from torch import nn

from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.worker.dummy_loras import DummyLoRAs
from minivllm.worker.input_batch import InputBatch


class LoRAModelRunnerMixin(DummyLoRAs):
    """Gives a model runner adapters. vLLM: `LoRAModelRunnerMixin`."""

    def load_lora_model(self, model: nn.Module, vllm_config: object, device: torch.device | str) -> nn.Module:
        """Wrap the model's layers, once, and give the model back."""
        self.lora_manager = LRUCacheWorkerLoRAManager(vllm_config, device)
        return self.lora_manager.create_lora_manager(model)

    def _manager(self) -> LRUCacheWorkerLoRAManager:
        if self.lora_manager is None:
            raise RuntimeError("LoRA is not enabled. Use enable_lora=True to enable LoRA.")
        return self.lora_manager

    # region lab 7.2: the adapters of a step
    def set_active_loras(
        self,
        input_batch: InputBatch,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        pad_to: int = 0,
    ) -> None:
        """Before every forward pass: adapters into slots, then ids into slots, then the backend's metadata.

        num_scheduled_tokens   (P,) int, tokens of each row of the batch
        num_sampled_tokens     (P,) int; None = every row samples one
        pad_to                 rows of the CUDA graph that the step runs in, 0 = none. Those past the batch are base
                               rows, in both mappings (`_pad`)

        All of it is one call of the manager's `set_active_adapters`, which keeps the order. Ids that are translated
        first would lead to the slots as they were before this step's evictions. It gets adapter *ids*, as a
        `LoRAMapping` with `is_prefill=True`, as in vLLM; no backend here asks.

        RuntimeError when LoRA is off (`_manager`).

        To use: `make_lora_inputs` of the batch (input_batch.py), `LoRAMapping(ids of tokens, ids of sampled rows)`
        (lora/mapping.py), `set_active_adapters(requests, mapping)` (lora/worker_manager.py).
        """
        if num_sampled_tokens is None:
            num_sampled_tokens = np.ones_like(num_scheduled_tokens)
        prompt_mapping, token_mapping, lora_requests = input_batch.make_lora_inputs(
            num_scheduled_tokens, num_sampled_tokens
        )
        mapping = LoRAMapping(_pad(token_mapping, pad_to), _pad(prompt_mapping, pad_to), is_prefill=True)
        self._manager().set_active_adapters(lora_requests, mapping)

    # endregion

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request; with `load_inplace`, again. Errors as when loading."""
        return self._manager().add_adapter(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        return self._manager().remove_adapter(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        return self._manager().pin_adapter(lora_id)

    def list_loras(self) -> set[int]:
        return self._manager().list_adapters()


def _pad(mapping: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return mapping + (0,) * (rows - len(mapping))
