@triton.jit(do_not_specialize=["h_split_stride", "h_slice_stride"])
def _lora_expand_kernel(
    h_ptr,
    b_ptrs,
    y_ptr,
    rows_ptr,
    tiles_ptr,
    ranks_ptr,
    R,
    capacity,
    num_slots,
    h_split_stride,
    h_slice_stride,
    h_row_stride,
    h_slot_stride,
    b_slot_strides,
    b_row_stride,
    y_row_stride,
    WIDTHS: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(tiles_ptr + tile).to(tl.int64)
    if slot < 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        return
    first = tl.load(tiles_ptr + capacity + tile)
    length = tl.load(tiles_ptr + 2 * capacity + tile)
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)[:, None]
    rank = tl.arange(0, BLOCK_R)

    offset = 0
    first_block = 0
    for i in tl.static_range(len(b_ptrs)):
        own = block - first_block
        blocks = tl.cdiv(WIDTHS[i], BLOCK_N)
        if (own >= 0) & (own < blocks):
            live = R if ranks_ptr is None else tl.load(ranks_ptr + i * num_slots + slot)
            columns = own * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = columns < WIDTHS[i]
            is_live = rank < live
            b = tl.load(
                b_ptrs[i] + slot * b_slot_strides[i] + columns[None, :] * b_row_stride + rank[:, None],
                mask=is_live[:, None] & is_column[None, :],
                other=0.0,
            )
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            h = tl.zeros((BLOCK_ROWS, BLOCK_R), dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                plane = h_ptr + split * h_split_stride + i * h_slice_stride + slot * h_slot_stride
                h += tl.load(
                    plane + rows * h_row_stride + rank[None, :],
                    mask=is_row[:, None] & is_live[None, :],
                    other=0.0,
                )
            update = tl.dot(h.to(b.dtype), b, input_precision="ieee")
            y_block = y_ptr + rows * y_row_stride + (offset + columns)[None, :]
            mask = is_row[:, None] & is_column[None, :]
            if ADD:
                before = tl.load(y_block, mask=mask, other=0.0)
                update = before + update
            tl.store(y_block, update, mask=mask)
        first_block += blocks
        offset += WIDTHS[i]
