"""vLLM's names of the GPU's arithmetic over ours. Stands for vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from typing import Any

import torch

from minivllm.gpu.folded_backend import FoldedBackend
from minivllm.gpu.sgmv import lora_expand, lora_shrink
from minivllm.gpu.triton_backend import TritonBackend
from minivllm.vllm.punica_wrapper import PunicaWrapperBase, Stacked


class PunicaWrapperGPU(PunicaWrapperBase, TritonBackend):
    """vLLM: the same name."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, max_loras: int
    ) -> None:
        TritonBackend.__init__(self, max_num_batched_tokens, max_batches, device, max_loras)

    def _shrink(self, y: Any, x: torch.Tensor, lora_a: Stacked, scale: float, rows: Any) -> None:
        lora_shrink(x, lora_a, y, *rows, scale)

    def _expand(
        self, y: torch.Tensor, x: Any, lora_b: Stacked, offset: int, add_inputs: bool, rows: Any
    ) -> None:
        lora_expand(x, lora_b, y, *rows, offset, add_inputs)


class PunicaWrapperFolded(PunicaWrapperGPU, FoldedBackend):
    """Ours, beside vLLM's."""
