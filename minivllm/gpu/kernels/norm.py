"""RMS norm kernels. Stands for vllm/csrc/layernorm_kernels.cu (v0.22.1)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps,
    x_row, x_head, out_row, out_head,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(x_ptr + row * x_row + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight
    tl.store(out_ptr + row * out_row + head * out_head + column, y, mask=inside)


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    x_row, residual_row, out_row,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    residual_ptrs = residual_ptr + row * residual_row + column
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    # The norm sees the sum as the residual stream keeps it: rounded.
    kept = x.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, kept, mask=inside)
    x = kept.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight
    tl.store(out_ptr + row * out_row + column, y, mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once.

    x: (T, H), or (T, heads, H) to normalise each head; only the last dimension must be contiguous
    weight: (H,)
    out: of x's shape, any strides but the last; may be x itself. A new contiguous tensor if not given.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    size, block, warps = _launch_sizes(x)
    _rms_norm_kernel[len(x), heads](
        x, weight, out, eps,
        x.stride(0), x.stride(-2), out.stride(0), out.stride(-2),
        H=size, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, rounded to its dtype; returns the norm of that sum.

    x, residual: (T, H), row strides of any width; weight: (H,) -> (T, H) contiguous
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size, block, warps = _launch_sizes(x)
    _fused_add_rms_norm_kernel[(len(x),)](
        x, residual, weight, out, eps,
        x.stride(0), residual.stride(0), out.stride(0),
        H=size, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def _launch_sizes(x: torch.Tensor) -> tuple[int, int, int]:
    """H, the power of two that holds it, and warps so that a thread has at most 16 elements (of 16 warps)."""
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    return size, block, min(max(block // 512, 1), 16)
