"""The GPU's backend whose adapters lie in pages. Beside vllm/lora/punica_wrapper/punica_gpu.py, not in vLLM."""

import torch

from minivllm.layers.linear import LinearBase
from minivllm.lora.backend import ALL_SLICES
from minivllm.lora.gpu.ops.paged_expand_op import paged_expand
from minivllm.lora.gpu.ops.paged_shrink_op import empty_planes, paged_shrink
from minivllm.lora.gpu.ops.paged_tuning import paged_shrink_tiles
from minivllm.lora.gpu.page_pool import PagePool
from minivllm.lora.gpu.paged_slots import PagedSlots
from minivllm.lora.gpu.triton_backend import TritonBackend
from minivllm.lora.ops.triton_ops import TileList
from minivllm.lora.slots import Slots


class PagedBackend(TritonBackend):
    """Adapters of linears and experts in pages of a few ranks each: every one takes room, and time, for its own rank.

    S is only the number of rows of a table, so it may be large. Kernels look a slot's pages up in that table, which
    stays where it is. Embeddings and heads keep slots of one size (`TritonSlots`): their widths are not the layers'.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        max_loras: int,
        max_rank: int,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras)
        self.pool = PagePool(max_loras, max_rank, device)
        self._beside: torch.cuda.Stream | None = None

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        if base is None and slots.a[0].shape[1] == 1:
            return super().place(slots, base)
        return self._keep(PagedSlots(slots, self.outdate_ranks, self.pool))

    def linear(self, x: torch.Tensor, base: LinearBase, slots: PagedSlots) -> torch.Tensor:
        """The shrink runs beside the base product where the step is captured: neither needs the other."""
        if self.no_lora:
            return base.forward(x)[0]
        pieces, tiles = slots.pieces, self.token_meta.meta_args(len(x))
        tuned = paged_shrink_tiles(len(x), pieces.widths[0], pieces.rank, len(pieces.a))
        h = empty_planes(x, pieces, tuned)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._beside = self._beside or torch.cuda.Stream(x.device)
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                paged_shrink(x, pieces, tiles, h, tuned)
            y = base.forward(x)[0]  # (T, N)
            torch.cuda.current_stream().wait_stream(self._beside)
        else:
            y = base.forward(x)[0]
            paged_shrink(x, pieces, tiles, h, tuned)
        paged_expand(h, pieces, y, tiles)
        return y

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        slots: Slots,
        rows: TileList,
        slices: slice = ALL_SLICES,
    ) -> None:
        if not isinstance(slots, PagedSlots):
            super().add(y, x, slots, rows, slices)
            return
        pieces = slots.pieces.of(slices)
        paged_expand(paged_shrink(x, pieces, rows), pieces, y, rows)

    def sync_slots(self) -> None:
        super().sync_slots()
        self.pool.sync()

    @property
    def tables(self) -> list[torch.Tensor]:
        return [*super().tables, self.pool.table]
