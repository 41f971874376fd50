@triton.jit(do_not_specialize=["h_split_stride", "h_slice_stride"])
def _lora_shrink_kernel(
    x_ptr,
    a_ptrs,
    h_ptr,
    rows_ptr,
    tiles_ptr,
    ranks_ptr,
    scaling,
    K,
    R,
    capacity,
    num_slots,
    x_row_stride,
    a_slot_stride,
    a_rank_stride,
    h_split_stride,
    h_slice_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(tiles_ptr + tile).to(tl.int64)
    if slot >= 0:
        first = tl.load(tiles_ptr + capacity + tile)
        length = tl.load(tiles_ptr + 2 * capacity + tile)
        place = tl.arange(0, BLOCK_ROWS)
        is_row = place < length
        rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)
        rank = tl.arange(0, BLOCK_R)
        columns = tl.arange(0, BLOCK_K)
        for i in tl.static_range(len(a_ptrs)):
            live = R if ranks_ptr is None else tl.load(ranks_ptr + i * num_slots + slot)
            h = tl.zeros((BLOCK_ROWS, BLOCK_R), dtype=tl.float32)
            if live > 0:
                for k in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
                    column = k + columns
                    x = tl.load(
                        x_ptr + rows[:, None] * x_row_stride + column[None, :],
                        mask=is_row[:, None] & (column < K)[None, :],
                        other=0.0,
                    )
                    a = tl.load(
                        a_ptrs[i] + slot * a_slot_stride + rank[None, :] * a_rank_stride + column[:, None],
                        mask=(column < K)[:, None] & (rank < live)[None, :],
                        other=0.0,
                    )
                    h += tl.dot(x, a.to(x.dtype), input_precision="ieee")
            out = h_ptr + split * h_split_stride + i * h_slice_stride + rows[:, None] * R + rank[None, :]
            tl.store(out, h * scaling, mask=is_row[:, None] & (rank < R)[None, :])
