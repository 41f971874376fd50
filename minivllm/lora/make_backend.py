"""Which backend does the arithmetic. Stands for vllm/lora/punica_wrapper/punica_selector.py (v0.22.1)."""

import torch

from minivllm.config import LoRAConfig
from minivllm.lora.backend import Backend
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.seams import backends


def make_backend(
    max_num_batched_tokens: int, max_batches: int, device: torch.device | str, lora_config: LoRAConfig
) -> Backend:
    """The backend that `lora_config.punica_backend` names; "auto" is the quickest one for the device.

    "loops" and "grouped" run anywhere; others are in `seams.backends`, and say themselves where they do not.
    """
    name = lora_config.backend_on(device)
    if name in ("loops", "grouped"):
        return LoopsBackend(device) if name == "loops" else RunsBackend(device)
    return backends[name](max_num_batched_tokens, max_batches, device, lora_config)
