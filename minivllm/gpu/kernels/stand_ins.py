"""Token ids that only the device knows. Stands for the input ids of async scheduling (vllm/v1/worker, v0.22.1)."""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _fill_in_kernel(ids_ptr, tokens_ptr, out_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    ids = tl.load(ids_ptr + place, mask=inside, other=0)
    stands_in = inside & (ids < 0)
    tokens = tl.load(tokens_ptr + (-1 - ids), mask=stands_in, other=0)
    tl.store(out_ptr + place, tl.where(stands_in, tokens, ids), mask=inside)


def fill_in(ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(T,) int64: the ids, and tokens[i] where an id is -1 - i.   ids: (T,) int64   tokens: (P,) int64"""
    out = torch.empty_like(ids)
    _fill_in_kernel[(triton.cdiv(len(ids), BLOCK),)](ids, tokens, out, len(ids), BLOCK=BLOCK)
    return out
