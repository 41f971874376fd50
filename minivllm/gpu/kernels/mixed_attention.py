"""Attention of prompts and single tokens alike over a paged cache, in one launch.

Stands for vllm/v1/attention/ops/triton_unified_attention.py (v0.22.1).
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.attention import LOWEST, _read_tile, _take_in

# Chosen for an H100. A tile of queries has so many rows: its tokens times the query heads of one kv head.
TILE_ROWS = 64
TILE_BYTES = 128  # of the context: a tile's tokens times an element's bytes
NUM_WARPS = 4
NUM_STAGES = 3


# One compiled kernel for tables of any form, as for decodes.
@triton.jit(
    do_not_specialize=["table_row", "capacity"],
    do_not_specialize_on_alignment=["tiles_ptr", "block_tables_ptr"],
)
def _mixed_attention_kernel(
    q_ptr, cache_ptr, tiles_ptr, block_tables_ptr, out_ptr,
    scale,  # of the scores, times log2(e)
    capacity, q_row, q_head, cache_slot, cache_head, table_row, out_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One kv head of one tile of queries; the GROUP queries of the head are rows beside those of other tokens."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    length = tl.load(tiles_ptr + 2 * capacity + tile)
    if length == 0:
        return
    request = tl.load(tiles_ptr + tile).to(tl.int64)
    first_row = tl.load(tiles_ptr + capacity + tile).to(tl.int64)
    first_position = tl.load(tiles_ptr + 3 * capacity + tile)

    member = tl.arange(0, ROWS)
    token = member // GROUP  # (ROWS,) of the tile
    dim = tl.arange(0, BLOCK_D)
    row = first_row + token
    head = kv_head * GROUP + member % GROUP
    is_query = (token < length)[:, None] & (dim < D)[None, :]
    q_ptrs = q_ptr + (row * q_row + head * q_head)[:, None] + dim[None, :]
    q = tl.load(q_ptrs, mask=is_query, other=0.0)  # (ROWS, D)
    last_seen = first_position + token  # (ROWS,)

    k_ptr = cache_ptr + kv_head * cache_head
    v_ptr = k_ptr + num_kv_heads * cache_head
    table_ptr = block_tables_ptr + request * table_row
    highest = tl.full((ROWS, 1), LOWEST, tl.float32)
    weights_sum = tl.zeros((ROWS, 1), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    # Padding stands before position 0, and so has no context.
    seq_len = first_position + length
    for kv_tile in range(tl.cdiv(seq_len, TILE)):
        k, v, in_context = _read_tile(
            k_ptr, v_ptr, table_ptr, kv_tile, seq_len, cache_slot, D, BLOCK_D, BLOCK_SIZE, TILE
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (ROWS, TILE)
        position = kv_tile * TILE + tl.arange(0, TILE)
        seen = in_context[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest, weights_sum, acc = _take_in(scores, v, highest, weights_sum, acc)

    weights_sum = tl.where(weights_sum == 0.0, 1.0, weights_sum)
    out_ptrs = out_ptr + (row * out_row + head * D)[:, None] + dim[None, :]
    tl.store(out_ptrs, acc / weights_sum, mask=is_query)


def queries_per_tile(group: int) -> int:
    """Tokens of a tile of queries.   group: query heads of a kv head"""
    return max(1, TILE_ROWS // group)


def mixed_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, tiles: torch.Tensor, block_tables: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of every tile's tokens over their request's context; deterministic, fit for a CUDA graph.

    q             (T, Hq, D), row stride of any width, heads' elements contiguous
    kv_cache      (num_blocks, block_size, 2 Hkv, D) contiguous, new tokens included
    tiles         (4, capacity) int32 of each tile: its request, its first row of q, how many rows (0 = no tile), and
                  the first one's position. At most `queries_per_tile` rows. Rows at positions below 0 read nothing
                  and give zeros
    block_tables  (P, W) int32

    Returns (T, Hq * D). Rows in no tile are left unwritten.
    """
    tokens, num_heads, size = q.shape
    num_kv_heads = kv_cache.shape[2] // 2
    group = num_heads // num_kv_heads
    out = torch.empty(tokens, num_heads * size, dtype=q.dtype, device=q.device)
    _mixed_attention_kernel[num_kv_heads, tiles.shape[1]](
        q, kv_cache, tiles, block_tables, out,
        scale * 1.4426950408889634,
        tiles.stride(0), q.stride(0), q.stride(1), kv_cache.stride(1), kv_cache.stride(2),
        block_tables.stride(0), out.stride(0),
        GROUP=group, ROWS=max(TILE_ROWS, triton.next_power_of_2(group)), D=size,
        BLOCK_D=max(16, triton.next_power_of_2(size)), BLOCK_SIZE=kv_cache.shape[1],
        TILE=TILE_BYTES // q.element_size(), num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
