"""vLLM's names of the GPU's arithmetic over ours. Stands for vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from operator import attrgetter
from typing import Any

import torch

from minivllm.gpu.sgmv import lora_expand, lora_shrink
from minivllm.gpu.triton_backend import TritonBackend
from minivllm.lora.backend import Backend
from minivllm.vllm.punica_wrapper import Ops, PunicaWrapperBase, Stacked


class SgmvOps:
    """All slices at once, with the kernels. Rows are tile lists."""

    def shrink(self, y: Any, x: torch.Tensor, lora_a: Stacked, scale: float, rows: Any) -> None:
        lora_shrink(x, lora_a, y, *rows, scale)

    def expand(
        self, y: torch.Tensor, x: Any, lora_b: Stacked, offset: int, add_inputs: bool, rows: Any
    ) -> None:
        lora_expand(x, lora_b, y, *rows, offset, add_inputs)


class PunicaWrapperGPU(PunicaWrapperBase):
    """vLLM: the same name."""

    token_meta = property(attrgetter("backend.token_meta"))
    prompt_meta = property(attrgetter("backend.prompt_meta"))

    def _arithmetic(
        self, max_tokens: int, max_samples: int, device: torch.device | str, max_loras: int
    ) -> tuple[Backend, Ops]:
        return TritonBackend(max_tokens, max_samples, device, max_loras), SgmvOps()
