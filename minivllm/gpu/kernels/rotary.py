"""Rotary embedding and the write to the KV cache in one kernel.

Stands for vllm/csrc/pos_encoding_kernels.cu and cache_kernels.cu (v0.22.1).
"""

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM = 8


@triton.jit
def _rotary_and_cache_kernel(
    heads_ptr, cos_ptr, sin_ptr, slot_mapping_ptr, cache_ptr,
    heads_row, heads_head, cos_row, sin_row, cache_slot, cache_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # (HEADS, 1)
    pair = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (pair < HALF)
    first_ptrs = heads_ptr + token * heads_row + head * heads_head + pair
    first = tl.load(first_ptrs, mask=inside, other=0.0).to(tl.float32)  # (HEADS, BLOCK)
    second = tl.load(first_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    # The sines' second half is the plain one; the first holds the minus of rotate-half.
    cos = tl.load(cos_ptr + token * cos_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)  # (1, BLOCK)
    sin = tl.load(sin_ptr + token * sin_row + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)

    rotates = head < NUM_HEADS + NUM_KV_HEADS  # values stay as they are
    rotated_first = tl.where(rotates, first * cos - second * sin, first)
    rotated_second = tl.where(rotates, second * cos + first * sin, second)
    tl.store(first_ptrs, rotated_first, mask=inside & rotates)
    tl.store(first_ptrs + HALF, rotated_second, mask=inside & rotates)

    # In the cache as in the batch, keys come before values: only the queries' heads drop out.
    slot = tl.load(slot_mapping_ptr + token)
    cache_ptrs = cache_ptr + slot * cache_slot + (head - NUM_HEADS) * cache_head + pair
    cached = inside & (head >= NUM_HEADS)
    tl.store(cache_ptrs, rotated_first, mask=cached)
    tl.store(cache_ptrs + HALF, rotated_second, mask=cached)


def rotary_and_cache(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
) -> None:
    """Rotate queries and keys in place, and write rotated keys and values to the cache.

    Computed in the float32 of the angles and rounded once, which transformers does at every operator.

    heads: (T, Hq + 2 Hkv, D), queries, keys, values; row stride of any width, heads' elements contiguous
    cos, sin: (T, 1, D), a row a token, as `RotaryEmbedding` gives them
    slot_mapping: (T,) int64; padding may share slot 0, of the null block
    kv_cache: (num_blocks, block_size, 2 Hkv, D) contiguous
    """
    tokens, total_heads, size = heads.shape
    num_kv_heads = kv_cache.shape[2] // 2
    _rotary_and_cache_kernel[tokens, triton.cdiv(total_heads, HEADS_PER_PROGRAM)](
        heads, cos, sin, slot_mapping, kv_cache,
        heads.stride(0), heads.stride(1), cos.stride(0), sin.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        NUM_HEADS=total_heads - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads,
        HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2), HEADS=HEADS_PER_PROGRAM,
    )  # fmt: skip
