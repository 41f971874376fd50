"""The GPU's backend whose adapters lie in pages. Beside vllm/lora/punica_wrapper/punica_gpu.py, not in vLLM."""

import torch

from minivllm.gpu.kernels.paged_expand_op import paged_expand
from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.kernels.paged_shrink_op import ShrinkRoom, counts_wanted, paged_shrink
from minivllm.gpu.kernels.paged_tuning import PagedShrinkTiles, paged_expand_tiles, paged_shrink_tiles
from minivllm.gpu.kernels.update import DeferredUpdate, Update
from minivllm.gpu.pages.pool import PagePool
from minivllm.gpu.pages.slots import PagedB, PagedSlots
from minivllm.gpu.sgmv import LoRAKernelMeta, TileList, expand, shrink
from minivllm.gpu.sgmv.tuning import FEW_TOKENS
from minivllm.gpu.triton_backend import TritonBackend
from minivllm.layers.linear import LinearBase
from minivllm.layers.ranks import Ranks
from minivllm.lora.backend import ALL_SLICES
from minivllm.lora.slots import Slots


class Tiling:
    """Which tiles kernels get: those that are fastest for the rows at hand. (`InvariantTiling` is another one.)

    meta_class   what makes tile lists
    defers       whether what adapters add may be left to kernels that read y, which choose their tiles themselves
    splits       shares of K in which slots of one size are shrunk; None = as is fastest
    """

    meta_class: type[LoRAKernelMeta] = LoRAKernelMeta
    defers = True
    splits: int | None = None

    def tokens(self, rows: int) -> int:
        """For how many tokens tiles are chosen, where there are so many rows."""
        return rows


class PagedBackend(TritonBackend):
    """Adapters of linears and experts in pages of a few ranks each: every one takes room, and time, for its own rank.

    S is only the number of rows of a table, so it may be large. Kernels look a slot's pages up in that table, which
    stays where it is. Embeddings and heads keep slots of one size (`TritonSlots`): their widths are not the layers'.

    max_rank  the most ranks an adapter may have, for which the table has pages in each row
    counts    of each tile and block of ranks, how many splits of a shrink have written their part. Zeros between
              shrinks, which run one after the other and so can share them
    tiling    which tiles kernels get
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        max_loras: int,
        max_rank: int,
        tiling: Tiling | None = None,
    ) -> None:
        self.tiling = tiling or Tiling()
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras, self.tiling.meta_class)
        self.pool = PagePool(max_loras, max_rank, device)
        self.counts = torch.zeros(0, dtype=torch.int32, device=device)
        self._beside: torch.cuda.Stream | None = None

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        if base is None and slots.a[0].shape[1] == 1:
            return super().place(slots, base)
        wanted = counts_wanted(self.token_meta.tiles.shape[1], len(slots.a), slots.a[0].shape[2])
        if wanted > len(self.counts):
            self.counts = self.counts.new_zeros(wanted)
        return self._keep(PagedSlots(slots, self.live_ranks.outdate, self.pool))

    def two_step(self, slots: Slots, tp: Ranks, sharded: slice) -> Slots:
        """As `two_step` of minivllm.options, in pages."""
        # An option of minivllm.options asks for it.
        from minivllm.gpu.pages.two_step_slots import PagedTwoStepSlots

        def place(kind: type[PagedSlots], of_group: Slots, page_ranks: int) -> PagedSlots:
            return self._keep(kind(of_group, self.live_ranks.outdate, self.pool, page_ranks))

        return PagedTwoStepSlots(slots, tp, sharded, place)

    def shrink(self, x: torch.Tensor, slots: PagedSlots, rows: TileList) -> torch.Tensor:
        """h = A · x, at least in float32, so that sums over processes lose nothing.   x: (T, K) -> (n, T, R)"""
        pieces = slots.pieces
        tuned = paged_shrink_tiles(len(x), pieces.widths[0], pieces.rank)
        room = self._room(x, pieces, rows, tuned)
        h = room.h.new_empty(room.h.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return paged_shrink(x, pieces, rows, room._replace(h=h), tuned)

    def expand(self, y: torch.Tensor, h: torch.Tensor, slots: Slots, rows: TileList) -> None:
        if not isinstance(slots, PagedB):
            super().expand(y, h, slots, rows)
            return
        h = h if slots.sharding is None else slots.sharding.in_order(h)
        h = h.to(slots.pieces.pool.dtype).contiguous()[None]  # (1, T, R)
        paged_expand(h, slots.pieces, y, rows)

    def linear(self, x: torch.Tensor, base: LinearBase, slots: PagedSlots) -> torch.Tensor:
        y, update = self.linear_deferred(x, base, slots)
        if update is not None:
            update.add_to(y)
        return y

    def linear_deferred(
        self, x: torch.Tensor, base: LinearBase, slots: PagedSlots
    ) -> tuple[torch.Tensor, DeferredUpdate | None]:
        if self.no_lora:
            return base.forward(x)[0], None
        if not self.tiling.defers:
            y = base.forward(x)[0]  # (T, N)
            self.add(y, x, slots, self.token_rows(len(x)))
            return y, None
        pieces, tiles = slots.pieces, self.token_meta.meta_args(len(x))
        y, h = self._base_and_shrink(x, base, pieces, tiles)
        return y, DeferredUpdate(Update(h, pieces), tiles, self.token_slots(len(x)))

    def _base_and_shrink(
        self, x: torch.Tensor, base: LinearBase, pieces: PagedPieces, tiles: TileList
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y without adapters (T, N), and h: side by side, where that costs the host no time."""
        tuned = paged_shrink_tiles(len(x), pieces.widths[0], pieces.rank)
        # Made here, since memory belongs to the stream it is made on.
        room = self._room(x, pieces, tiles, tuned)
        if not x.is_cuda or (len(x) <= FEW_TOKENS and not torch.cuda.is_current_stream_capturing()):
            return base.forward(x)[0], paged_shrink(x, pieces, tiles, room, tuned)
        here = torch.cuda.current_stream()
        self._beside = self._beside or torch.cuda.Stream(x.device)
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            h = paged_shrink(x, pieces, tiles, room, tuned)
        y = base.forward(x)[0]
        here.wait_stream(self._beside)
        return y, h

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        slots: Slots,
        rows: TileList,
        slices: slice = ALL_SLICES,
    ) -> None:
        if not isinstance(slots, PagedSlots):
            h = shrink(x, slots.flat_a[slices], rows, slots.ranks[slices], splits=self.tiling.splits)
            expand(h, slots.flat_b[slices], y, rows, slots.ranks[slices])
            return
        self._add_paged(y, x, slots.pieces.of(slices), rows, self.tiling.tokens(len(x)))

    def _add_paged(
        self, y: torch.Tensor, x: torch.Tensor, pieces: PagedPieces, tiles: TileList, tokens: int
    ) -> None:
        """One kernel after the other, with the tile sizes of so many tokens."""
        tuned = paged_shrink_tiles(tokens, pieces.widths[0], pieces.rank)
        h = paged_shrink(x, pieces, tiles, self._room(x, pieces, tiles, tuned), tuned)
        paged_expand(h, pieces, y, tiles, paged_expand_tiles(tokens, pieces.rank, max(pieces.heights)))

    def _room(
        self, x: torch.Tensor, pieces: PagedPieces, tiles: TileList, tuned: PagedShrinkTiles
    ) -> ShrinkRoom:
        wanted = counts_wanted(tiles.count, len(pieces.a), pieces.rank)
        counts = self.counts if wanted <= len(self.counts) else self.counts.new_zeros(wanted)
        return ShrinkRoom.make(x, pieces, counts, tuned)

    def sync_slots(self) -> None:
        super().sync_slots()
        self.pool.sync()

    @property
    def tables(self) -> list[torch.Tensor]:
        return [*super().tables, self.pool.table, self.counts]
