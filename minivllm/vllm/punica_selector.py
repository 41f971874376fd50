"""Which backend does the arithmetic, under vLLM's names. Stands for vllm/lora/punica_wrapper/__init__.py (v0.22.1)."""

import torch

from minivllm.config import LoRAConfig
from minivllm.gpu import refuse_without_gpu
from minivllm.vllm.punica_wrapper import (
    PunicaWrapperABC,
    PunicaWrapperBase,
    PunicaWrapperCPU,
    PunicaWrapperLoops,
    convert_mapping,
)

__all__ = [
    "PunicaWrapper",
    "PunicaWrapperABC",
    "PunicaWrapperBase",
    "PunicaWrapperCPU",
    "PunicaWrapperLoops",
    "convert_mapping",
    "get_punica_wrapper",
]


def get_punica_wrapper(
    max_num_batched_tokens: int,
    max_batches: int,
    device: torch.device | str,
    *,
    lora_config: LoRAConfig | None = None,
) -> PunicaWrapperBase:
    """The backend that `lora_config.punica_backend` names, under vLLM's names. vLLM: the same name."""
    config = lora_config or LoRAConfig()
    name = config.backend_on(device)
    if name in ("loops", "grouped"):
        kind = PunicaWrapperLoops if name == "loops" else PunicaWrapperCPU
        return kind(max_num_batched_tokens, max_batches, device)
    refuse_without_gpu(name, device)
    # Triton is not everywhere.
    from minivllm.vllm.punica_gpu import PunicaWrapperGPU

    return PunicaWrapperGPU(max_num_batched_tokens, max_batches, device, max_loras=config.max_loras)


def PunicaWrapper(
    max_num_batched_tokens: int,
    max_batches: int,
    device: torch.device | str,
    max_loras: int | None = None,
) -> PunicaWrapperBase:
    """The wrapper for a device, by the name that documents give it. vLLM has had a class for each device since 0.7."""
    config = LoRAConfig(max_loras=max_loras or LoRAConfig.max_loras)
    return get_punica_wrapper(max_num_batched_tokens, max_batches, device, lora_config=config)
