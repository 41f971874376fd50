"""Shrink, expand and writing over pages, against float64: pages in any order, NaN wherever nothing is live."""

import pytest
import torch

from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.adapted_silu_op import adapted_silu
from minivllm.gpu.kernels.paged_expand_op import paged_expand
from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.kernels.paged_shrink_op import ShrinkRoom, counts_wanted, paged_shrink
from minivllm.gpu.kernels.paged_tuning import (
    adapted_norm_tiles,
    adapted_silu_tiles,
    paged_expand_tiles,
    paged_shrink_tiles,
)
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.kernels.write_pages_op import write_pages
from minivllm.gpu.pages.backend import PagedBackend
from minivllm.gpu.pages.slots import PagedSlots
from minivllm.gpu.sgmv import LoRAKernelMeta
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.slots import Slots
from tests.tools.device import DEVICE
from tests.tools.memory import random
from tests.tools.nights import by_day

# Float64 is what a CPU's tests compute in, never a GPU's engine.
DTYPES = [torch.float32, torch.float16, torch.bfloat16 if torch.cuda.is_available() else torch.float64]
# Of h and y as a share of the largest value: products of half-precision numbers are summed in float32.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}

# tokens, R, K, widths, page ranks
SHAPES = [
    (1, 8, 64, [24, 16, 40], 8),
    (9, 20, 150, [130, 70], 4),
    (18, 130, 48, [33, 20], 16),
]
GATED_SHAPES = [(20, 16, 160, [40] * 2, 8), (37, 72, 96, [70] * 2, 4)]  # gate and up, of one height
NORMED_SHAPES = [(37, 12, 96, [576], 4), (50, 32, 32, [1301], 8)]  # rows that a norm reads
SLOTS = 5
AT_NIGHT = pytest.mark.nightly_without_gpu


class Batch:
    """A batch on slots of unlike ranks, the weights in pages dealt at random from a pool of NaN.

    bound   called with the pool before anything is written to it
    """

    def __init__(self, shape, dtype, experts=1, bound=lambda pool: None):
        self.tokens, self.rank, self.width, self.heights, self.page_ranks = shape
        n, pages_a_slot = len(self.heights), -(-self.rank // self.page_ranks)
        pick = torch.Generator().manual_seed(self.tokens)
        full = (self.rank, 0, 1, self.rank // 2, max(1, self.rank - 3))
        self.ranks = [[full[(slot + 2 * i) % 5] for slot in range(SLOTS)] for i in range(n)]
        self.adapters = torch.randint(0, SLOTS * experts, (self.tokens,), generator=pick)
        self.adapters[torch.rand(self.tokens, generator=pick) < 0.3] = -1
        self.adapters[-1] = SLOTS * experts - 1
        self.experts = experts
        self.x = random(self.tokens, self.width, dtype=dtype, seed=1)
        self.y = random(self.tokens, sum(self.heights), dtype=dtype, seed=2)
        self.a = [random(SLOTS, experts, self.rank, self.width, dtype=dtype, seed=10 + i) for i in range(n)]
        self.b = [
            random(SLOTS, experts, h, self.rank, dtype=dtype, seed=20 + i) for i, h in enumerate(self.heights)
        ]
        sizes = [experts * self.page_ranks * length for length in (*[self.width] * n, *self.heights)]
        places = [8 + sum(size + 3 for size in sizes[:i]) for i in range(len(sizes))]
        stride = places[-1] + sizes[-1] + 5
        count = SLOTS * pages_a_slot + 2
        dealt = torch.randperm(count, generator=pick)
        whole = (
            -2 * (n - 1) % 5
        )  # of the last slice, this slot has all ranks: it begins in the pool's last page
        dealt = dealt.roll(whole * pages_a_slot - int(dealt.argmax()))
        self.table = dealt[: SLOTS * pages_a_slot].view(SLOTS, pages_a_slot)
        # The last page ends where its last piece does.
        pool = torch.full((count * stride - 5,), float("nan"), dtype=dtype)
        self.pieces = PagedPieces(
            pool.to(DEVICE),
            self.table.int().to(DEVICE),
            torch.tensor(self.ranks, dtype=torch.int32, device=DEVICE),
            *(self.rank, self.page_ranks, stride, experts, tuple(places[:n]), tuple(places[n:])),
            *((self.width,) * n, tuple(self.heights)),
        )
        meta = LoRAKernelMeta.make(SLOTS * experts, self.tokens, DEVICE)
        meta.prepare_tensors(self.adapters)
        self.tiles = meta.meta_args(self.tokens)
        bound(self.pieces.pool)
        for slot in range(SLOTS):
            self.write(slot)

    def write(self, slot):
        """One slot's weights by the kernel that writes pages."""
        pieces, flat, sources, places = self.pieces, [], [], []
        for i in range(len(self.a)):
            live = self.ranks[i][slot]
            for expert in range(self.experts):
                both = self.a[i][slot, expert, :live], self.b[i][slot, expert, :, :live]
                for tensor, first, width, is_b in zip(
                    both, (pieces.a[i], pieces.b[i]), (self.width, self.heights[i]), (0, 1)
                ):
                    sources.append([sum(t.numel() for t in flat), *tensor.shape] if live else [0, 0, 0])
                    flat.append(tensor.reshape(-1))
                    first += expert * self.page_ranks * width
                    address = pieces.pool.data_ptr() + first * pieces.pool.itemsize
                    places.append([address, pieces.page_stride, width, is_b, self.page_ranks])
        sources.append([0, 3, 5])
        places.append([0] * 5)  # in no page
        write_pages(
            torch.cat([*flat, flat[0].new_zeros(1)]).to(DEVICE),
            torch.tensor(sources, device=DEVICE),
            torch.tensor(places, device=DEVICE),
            self.table[slot].int().to(DEVICE),
            self.rank * max(self.width, *self.heights),
        )

    def expected(self):
        """h of each slice and row, and y, in float64."""
        y, hs = self.y.double().clone(), []
        for row, adapter in enumerate(self.adapters.tolist()):
            slot, expert, offset, h_row = adapter // self.experts, adapter % self.experts, 0, []
            for i, height in enumerate(self.heights):
                live = self.ranks[i][slot] if adapter >= 0 else 0
                h = self.a[i][slot, expert, :live].double() @ self.x[row].double()
                y[row, offset : offset + height] += self.b[i][slot, expert, :, :live].double() @ h
                offset += height
                h_row.append(h)
            hs.append(h_row)
        return hs, y


def assert_near(found, expected, tolerance):
    assert not found.isnan().any(), "NaN: something was read past a live rank, or left unwritten"
    assert (found.double().cpu() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def room_of_nan(batch, tuned):
    """Where nothing was written, there is NaN."""
    n = len(batch.heights)
    counts = torch.zeros(counts_wanted(batch.tiles.count, n, batch.rank), dtype=torch.int32, device=DEVICE)
    room = ShrinkRoom.make(batch.x.to(DEVICE), batch.pieces, counts, tuned)
    room.h.fill_(float("nan"))
    room.planes.fill_(float("nan"))
    return room


def all_tilings(batch):
    """Those of decodes and prompts, whatever the shape; then many small blocks and shares."""
    sizes = (batch.width, batch.rank), (batch.rank, max(batch.heights))
    found = [
        (paged_shrink_tiles(tokens, *sizes[0]), paged_expand_tiles(tokens, *sizes[1]))
        for tokens in (1, 100, 1000, 4096)
    ]
    shrink, expand = found[-1]
    small = shrink._replace(splits=3, block_k=32, block_r=16), expand._replace(block_n=32, block_r=16)
    return [*dict.fromkeys(found), small]


@pytest.mark.parametrize(
    ("dtype", "experts"),
    [(torch.float32, 2), (torch.float16, 1), pytest.param(DTYPES[2], 1, marks=AT_NIGHT)],
    ids=str,
)
@pytest.mark.parametrize("shape", by_day(SHAPES, 2, AT_NIGHT), ids=str)
def test_every_row_gets_its_own_adapters_product_whatever_pages_it_has(shape, dtype, experts):
    batch = Batch(shape, dtype, experts)
    hs, expected = batch.expected()

    for shrink_tiles, expand_tiles in all_tilings(batch):
        room, y = room_of_nan(batch, shrink_tiles), batch.y.clone().to(DEVICE)
        h = paged_shrink(batch.x.to(DEVICE), batch.pieces, batch.tiles, room, shrink_tiles)
        paged_expand(h, batch.pieces, y, batch.tiles, expand_tiles)

        assert not room.counts.any(), "the next shrink counts on from these"
        for row, parts in enumerate(hs):
            for i, part in enumerate(parts):
                found = h[i, row].cpu()
                tolerance = max(TOLERANCE[dtype], TOLERANCE[torch.float32] * 4)
                assert_near(found[: len(part)], part, tolerance) if len(part) else None
                assert found[len(part) :].isnan().all(), "h was written past the live rank"
        assert_near(y, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", by_day(DTYPES, 3, AT_NIGHT), ids=str)
@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
def test_the_activation_adds_what_adapters_add_to_gate_and_up_on_its_way(shape, dtype):
    batch = Batch(shape, dtype)
    gate, up = batch.expected()[1].chunk(2, dim=1)
    tuned = paged_shrink_tiles(batch.tokens, batch.width, batch.rank)
    h = paged_shrink(batch.x.to(DEVICE), batch.pieces, batch.tiles, room_of_nan(batch, tuned), tuned)
    few, many = adapted_silu_tiles(1, batch.rank), adapted_silu_tiles(4096, batch.rank)

    for tiles in (few, many, many._replace(block_n=32, block_r=16)):
        y = batch.y.to(DEVICE)
        found = adapted_silu(Update(h, batch.pieces), y, batch.tiles, tiles)

        assert_near(found, torch.nn.functional.silu(gate) * up, TOLERANCE[dtype])
        assert torch.equal(y.cpu(), batch.y)


@pytest.mark.parametrize("dtype", by_day(DTYPES, 3, AT_NIGHT), ids=str)
@pytest.mark.parametrize("shape", NORMED_SHAPES, ids=str)
def test_the_norm_adds_what_adapters_add_on_its_way(shape, dtype):
    batch = Batch(shape, dtype)
    (width,) = batch.heights
    stream, weight = random(batch.tokens, width, dtype=dtype, seed=3), random(width, dtype=dtype, seed=4)
    expected = stream.double() + batch.expected()[1]
    tuned = paged_shrink_tiles(batch.tokens, batch.width, batch.rank)
    h = paged_shrink(batch.x.to(DEVICE), batch.pieces, batch.tiles, room_of_nan(batch, tuned), tuned)
    update, slots, y = Update(h, batch.pieces), batch.adapters.to(DEVICE), batch.y.to(DEVICE)

    of_shape = adapted_norm_tiles(width, batch.rank, dtype.itemsize)
    for tiles in (of_shape, of_shape._replace(block_r=4)):
        residual = stream.to(DEVICE, copy=True)
        found = adapted_norm(update, slots, weight.to(DEVICE), 1e-3, y, residual, tiles)

        assert_near(residual, expected, TOLERANCE[dtype])
        kept = residual.double().cpu()
        normed = kept * (kept.square().mean(1, keepdim=True) + 1e-3).rsqrt() * weight.double()
        assert_near(found, normed, TOLERANCE[dtype])
        assert torch.equal(y.cpu(), batch.y)


def test_a_shrink_gives_the_same_bits_in_every_run():
    batch = Batch((20, 8, 512, [16], 8), torch.float32)
    tuned = paged_shrink_tiles(20, 512, 8)._replace(splits=8, block_k=32)

    runs = [
        paged_shrink(batch.x.to(DEVICE), batch.pieces, batch.tiles, room_of_nan(batch, tuned), tuned).cpu()
        for _ in range(20 if DEVICE == "cuda" else 2)
    ]

    assert not runs[0].isnan().all()
    assert all(torch.equal(run.nan_to_num(), runs[0].nan_to_num()) for run in runs)


def test_a_heads_slots_are_in_no_pages_and_the_same_backend_adds_what_they_hold():
    x, y = random(3, 24, seed=1), random(3, 40, seed=2)
    a, b = random(5, 24, seed=3), random(40, 5, seed=4)
    backend = PagedBackend(3, 3, DEVICE, 2, 8)
    slots = backend.place(Slots.empty(2, 8, [(24, 40)], torch.float32, DEVICE), None)
    slots.write(1, [LoRALayerWeights("lm_head", 5, 5, a, b)])
    backend.begin_step(LoRAMapping((6, 0, 6), (6, 0, 6)), [None, 6])

    found = y.to(DEVICE, copy=True)
    backend.add(found, x.to(DEVICE), slots, backend.sample_rows(3))

    assert not isinstance(slots, PagedSlots)
    added = x.double() @ a.double().T @ b.double().T
    added[1] = 0
    assert_near(found, y.double() + added, TOLERANCE[torch.float32])
