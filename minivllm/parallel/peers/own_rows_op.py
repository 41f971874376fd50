"""A process's rows of a table that processes share out, in one kernel. Beside `get_masked_input_and_mask` of
vllm/model_executor/layers/vocab_parallel_embedding.py (v0.22.1), which torch.compile makes one.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _own_rows_kernel(
    ids_ptr, slots_ptr, tables_ptr, out_ptr, start, end, added_start, added_end,
    slot_stride, row_stride, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one token's row, or zeros. slots_ptr: None = there is one table"""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token_id = tl.load(ids_ptr + token)
    is_org = (token_id >= start) & (token_id < end)
    is_added = (token_id >= added_start) & (token_id < added_end)
    row = token_id - tl.where(is_org, start, added_start - (end - start))
    slot = 0 if slots_ptr is None else tl.load(slots_ptr + token)
    values = tables_ptr + slot * slot_stride + row * row_stride + column
    found = tl.load(values, mask=inside & (is_org | is_added), other=0.0)
    tl.store(out_ptr + token * width + column, found, mask=inside)


def own_rows(
    ids: torch.Tensor,
    tables: torch.Tensor,
    own: slice,
    added: tuple[int, int] = (0, 0),
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """The row of each token that is among the process's own, or added; zeros for others.   -> (T, H)

    ids     (T,) int64
    tables  (rows, H), or (S, rows, H) with slots; a row's elements side by side. First rows of own tokens, then added
    own     which tokens these are
    added   from which token to which; they have the rows behind
    slots   (T,) int64 which table of S
    """
    width = tables.shape[-1]
    out = tables.new_empty(len(ids), width)
    if len(ids):
        _own_rows_kernel[len(ids), triton.cdiv(width, BLOCK)](
            ids, slots, tables, out, own.start, own.stop, *added, tables.stride(0), tables.stride(-2), width,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        )  # fmt: skip
    return out
