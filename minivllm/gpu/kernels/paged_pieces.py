"""Where the A's and B's of one layer lie in a pool of pages.

Beside vllm/lora/ops/triton_ops/utils.py (v0.22.1), whose slots are of one size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl


class PagedPieces(NamedTuple):
    """One layer's n pairs of A and B in the pages of every slot. A page holds p ranks of them, p being `page_ranks`.

    pool     (pages * page_stride,) the pages' elements
    table    (S, G) int32: the page of a slot's ranks 0..p-1, p..2p-1 and so on. Past its last it may hold anything
    ranks    (n, S) int32 live rank of each slice and slot
    rank     R, the largest
    experts  E, 1 but for experts; adapter s * E + e is expert e of slot s
    a, b     of each slice, in elements: where its A (E, p, K_i) and its transposed B (E, p, N_i) begin in a page
    widths   K_i      heights  N_i
    """

    pool: torch.Tensor
    table: torch.Tensor
    ranks: torch.Tensor
    rank: int
    page_ranks: int
    page_stride: int
    experts: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    widths: tuple[int, ...]
    heights: tuple[int, ...]

    def of(self, slices: slice) -> PagedPieces:
        """Some of the slices."""
        per_slice = {name: getattr(self, name)[slices] for name in ("ranks", "a", "b", "widths", "heights")}
        return self._replace(**per_slice)


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """In which kernels add up products: float64 only of float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32
