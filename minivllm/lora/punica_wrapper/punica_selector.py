"""Which backend does the arithmetic. Stands for vllm/lora/punica_wrapper/punica_selector.py (v0.22.1)."""

from __future__ import annotations

import torch

from minivllm.config import LoRAConfig
from minivllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from minivllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU, PunicaWrapperLoops


def get_punica_wrapper(
    max_num_batched_tokens: int,
    max_batches: int,
    device: torch.device | str,
    *,
    lora_config: LoRAConfig | None = None,
) -> PunicaWrapperBase:
    """The backend that `lora_config.punica_backend` names; "auto" is the quickest one for the device."""
    backend = "auto" if lora_config is None else lora_config.punica_backend
    wrapper = PunicaWrapperLoops if backend == "loops" else PunicaWrapperCPU
    return wrapper(max_num_batched_tokens, max_batches, device)
