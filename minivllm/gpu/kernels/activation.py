"""The gated activation as a kernel. Stands for vllm/csrc/activation_kernels.cu (v0.22.1)."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, gate_up_row, out_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptrs = gate_up_ptr + row * gate_up_row + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, computed in float32 and rounded once.

    gate_up: (T, 2I), gate then up, row stride of any width -> (T, I) contiguous
    """
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul_kernel[tokens, triton.cdiv(width, BLOCK)](
        gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=BLOCK
    )
    return out
