"""A kernel so small that it works wherever Triton does: one matrix product, checked against PyTorch."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    square = place[:, None] * SIZE + place[None, :]
    product = tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square))
    tl.store(out_ptr + square, product.to(out_ptr.dtype.element_ty))


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype).to(device) for _ in range(2))
    out = torch.empty_like(a)
    _product[(1,)](a, b, out, SIZE=16)
    error = (out.float() - a.float() @ b.float()).abs().max().item()
    print(f"triton {triton.__version__}, a product is off by {error:.1g} at most")
    sys.exit(error > 0.1)


if __name__ == "__main__":
    main()
