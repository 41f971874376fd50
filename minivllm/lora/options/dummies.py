"""Adapters of zeros, to warm up. Stands for a part of vllm/lora/model_manager.py and worker_manager.py (v0.22.1).

Importing this gives weights and managers vLLM's methods for them.
"""

import torch

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.lora.wrapped_modules import WrappedModules


def create_dummy_lora_weights(
    cls: type[LoRALayerWeights],
    module_name: str,
    input_dim: int,
    output_dim: int,
    rank: int,
    dtype: torch.dtype,
    device: str,
) -> LoRALayerWeights:
    """Zeros of the right shape, for warm-up: they cost what a real adapter costs and change nothing."""
    lora_a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
    lora_b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
    return cls(module_name, rank, 1, lora_a, lora_b, scaling=1)


def dummy_adapter(wrapped: WrappedModules, lora_id: int, rank: int) -> LoRAModel:
    """An adapter of zeros over everything that is wrapped."""
    loras = {}
    for name, module in wrapped.modules.items():
        dtype = module.slots.a[0].dtype
        for target, part in (module.targets or {name: 0}).items():
            width, height = module.part_shape(part)
            if not module.targets:  # one name for all slices together
                height = sum(height for _, height in module.slice_sizes)
            loras[target] = LoRALayerWeights.create_dummy_lora_weights(
                target, width, height, rank, dtype, "cpu"
            )
    return LoRAModel(lora_id, rank, loras)


def create_dummy_lora(
    self: LRUCacheLoRAModelManager,
    lora_id: int,
    rank: int,
    embedding_modules: dict[str, str] | None = None,
) -> LoRAModel:
    return dummy_adapter(self.wrapped, lora_id, rank)


def add_dummy_lora(self: LRUCacheWorkerLoRAManager, lora_request: LoRARequest, rank: int) -> bool:
    """Register an adapter of zeros under the request's id, without reading anything. False if it is known."""
    if lora_request.lora_int_id in self.list_adapters():
        return False
    dummy = self.manager.create_dummy_lora(lora_request.lora_int_id, rank)
    dummy.name = lora_request.lora_name
    return self.manager.add_adapter(dummy)


LoRALayerWeights.create_dummy_lora_weights = classmethod(create_dummy_lora_weights)
LRUCacheLoRAModelManager.create_dummy_lora = create_dummy_lora
LRUCacheWorkerLoRAManager.add_dummy_lora = add_dummy_lora
