"""Which backend does the arithmetic. Stands for vllm/lora/punica_wrapper/punica_selector.py (v0.22.1)."""

from __future__ import annotations

import os

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
    """The backend that `lora_config.punica_backend` names; "auto" is the quickest one for the device.

    "loops" and "grouped" run anywhere, "triton" and "folded" on a GPU (without one, through Triton's interpreter).
    ValueError where neither is there.
    """
    backend = (lora_config or LoRAConfig()).backend_on(device)
    if backend in ("triton", "folded"):
        if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            # The variable is Triton's own, for its interpreter: slow, and enough for tests.
            raise ValueError(
                f"punica backend '{backend}' needs a GPU; on a CPU take grouped, or set TRITON_INTERPRET=1"
            )
        from minivllm.lora.punica_wrapper.punica_gpu import PunicaWrapperFolded, PunicaWrapperGPU

        gpu_wrapper = PunicaWrapperFolded if backend == "folded" else PunicaWrapperGPU
        return gpu_wrapper(max_num_batched_tokens, max_batches, device, lora_config.max_loras)
    wrapper = PunicaWrapperLoops if backend == "loops" else PunicaWrapperCPU
    return wrapper(max_num_batched_tokens, max_batches, device)
