"""What only a GPU needs: slots laid out for kernels, copies beside a step. See vllm/lora/punica_wrapper/."""

import os

import torch

from minivllm.config import LoRAConfig
from minivllm.lora import seams
from minivllm.lora.backend import Backend


def _triton(max_tokens: int, max_samples: int, device: torch.device | str, config: LoRAConfig) -> Backend:
    """The backend "triton" or "folded". ValueError on a CPU, except through Triton's interpreter."""
    name = config.backend_on(device)
    if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        # The variable is Triton's own, for its interpreter: slow, and enough for tests.
        raise ValueError(f"punica backend '{name}' needs a GPU; on a CPU take grouped, or set TRITON_INTERPRET=1")
    # Triton is not everywhere.
    from minivllm.lora.gpu.folded_backend import FoldedBackend
    from minivllm.lora.gpu.triton_backend import TritonBackend

    kind = FoldedBackend if name == "folded" else TritonBackend
    return kind(max_tokens, max_samples, device, config.max_loras)


seams.backends.update(triton=_triton, folded=_triton)
