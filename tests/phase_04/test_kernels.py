"""The shrink kernel (lab 4.2) and the expand kernel (lab 4.3), against float64, with NaN around every buffer."""

import pytest
import torch
from gpu import DEVICE, needs_cuda
from guarded import (
    DTYPES,
    TOLERANCE,
    exact_expand,
    exact_shrink,
    guarded,
    live_part,
    random,
    random_slots,
    relative_error,
)

from minivllm.lora.ops.triton_ops import LoRAKernelMeta, expand, lora_expand, lora_shrink, shrink

# tokens, slots, rank, K, widths: powers of two and anything but
SHAPES = [
    (1, 1, 8, 64, [48]),
    (5, 3, 5, 37, [19]),
    (40, 4, 16, 160, [64, 16, 16]),
    (33, 9, 24, 300, [130, 70]),
    (70, 2, 64, 96, [40, 40]),
    (3, 3, 200, 48, [33]),
]
IDS = ["-".join(map(str, (t, s, r, k, *w))) for t, s, r, k, w in SHAPES]


def ranks_of(n, slots, rank):
    """n x S live ranks: full, none, one, and between."""
    return [
        [(rank, 0, 1, rank // 2, max(1, rank - 3))[(slot + 2 * i) % 5] for slot in range(slots)]
        for i in range(n)
    ]


def tile_list(token_slots, slots):
    meta = LoRAKernelMeta.make(slots, len(token_slots), DEVICE)
    meta.prepare_tensors(token_slots)
    return meta.meta_args(len(token_slots))


def on_device(ranks):
    return torch.tensor(ranks, dtype=torch.int32, device=DEVICE)


class Batch:
    """A random batch of one of SHAPES: buffers between NaN, dead ranks NaN."""

    def __init__(self, shape, dtype, seed=0, base_share=0.3):
        self.tokens, self.slots, self.rank, self.width, self.widths = shape
        n = len(self.widths)
        self.token_slots = random_slots(self.tokens, self.slots, base_share, seed)
        self.token_slots[-1] = self.slots - 1
        self.ranks = ranks_of(n, self.slots, self.rank)
        self.x = random(self.tokens, self.width, dtype=dtype, seed=seed)
        self.a = [
            random(self.slots, self.rank, self.width, dtype=dtype, seed=seed + 10 + i) for i in range(n)
        ]
        self.b = [
            random(self.slots, w, self.rank, dtype=dtype, seed=seed + 20 + i)
            for i, w in enumerate(self.widths)
        ]
        self.h = random(n, self.tokens, self.rank, seed=seed + 30)
        self.y = random(self.tokens, sum(self.widths), dtype=dtype, seed=seed + 40)
        self.tiles = tile_list(self.token_slots, self.slots)
        self.live_a = [guarded(live_part(a, r, 0)) for a, r in zip(self.a, self.ranks)]
        self.live_b = [guarded(live_part(b, r, 1)) for b, r in zip(self.b, self.ranks)]
        self.is_adapter = self.token_slots >= 0


@pytest.mark.lab("4.2")
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_the_planes_of_a_shrink_add_up_to_every_rows_own_product(shape, dtype, splits):
    batch = Batch(shape, dtype)

    x = guarded(batch.x, row_gap=7)
    planes = shrink(x, batch.live_a, batch.tiles, on_device(batch.ranks), 0.5, splits)

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks, 0.5)
    found = planes.sum(0).cpu()[:, batch.is_adapter]
    assert planes.dtype == torch.float32
    assert splits is None or len(planes) == splits
    assert relative_error(found, expected[:, batch.is_adapter]) < 1e-6


@pytest.mark.lab("4.2")
def test_a_shrink_of_more_planes_than_there_is_to_split_leaves_zeros_in_them():
    batch = Batch((4, 2, 8, 40, [16]), torch.float32)

    planes = shrink(guarded(batch.x), batch.live_a, batch.tiles, on_device(batch.ranks), splits=4)

    assert (planes[1:][:, :, batch.is_adapter] == 0).all()


@pytest.mark.lab("4.3")
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_an_expand_adds_every_rows_own_product_and_leaves_base_rows_alone(shape, dtype, planes):
    batch = Batch(shape, dtype)
    parts = [random(*batch.h.shape, seed=50 + i) for i in range(planes - 1)]
    parts.append(batch.h - sum(parts))

    y = guarded(batch.y, row_gap=5)
    h = torch.stack([live_part(p.transpose(1, 2), [batch.rank] * len(p), 0).transpose(1, 2) for p in parts])
    h[:, :, ~batch.is_adapter] = float("nan")
    expand(guarded(h), batch.live_b, y, batch.tiles, on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert torch.equal(y.cpu()[~batch.is_adapter], batch.y[~batch.is_adapter])
    assert relative_error(y, expected) < TOLERANCE[dtype]


@pytest.mark.lab("4.3")
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_an_expand_reads_h_of_the_rows_own_slot_from_a_product_that_holds_all_slots(shape):
    batch = Batch(shape, torch.float32)
    n, slots, rank = len(batch.widths), batch.slots, batch.rank
    wide = torch.full((batch.tokens, slots, n, rank), float("nan"))
    for row, slot in enumerate(batch.token_slots.tolist()):
        for i in range(n if slot >= 0 else 0):
            live = batch.ranks[i][slot]
            wide[row, slot, i, :live] = batch.h[i, row, :live]

    y, wide = guarded(batch.y), guarded(wide.flatten(1))
    h = wide[:, : n * rank].unflatten(1, (n, rank)).transpose(0, 1)[None]
    expand(h, batch.live_b, y, batch.tiles, on_device(batch.ranks), h_slot_stride=n * rank)

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert relative_error(y, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_vllms_entry_points_give_complete_sums_and_overwrite_or_add(shape, dimensions):
    batch = Batch(shape, torch.float32)
    n, full = len(batch.widths), [[batch.rank] * batch.slots] * len(batch.widths)
    as_stacked = (lambda w: w.to(DEVICE).unsqueeze(1)) if dimensions == 4 else (lambda w: w.to(DEVICE))

    h = guarded(torch.full((n, batch.tokens, batch.rank), 7.0))
    lora_shrink(guarded(batch.x), [as_stacked(a) for a in batch.a], h, *batch.tiles, 2.0)
    added, written = guarded(batch.y, row_gap=3), guarded(batch.y, row_gap=3)
    b = [as_stacked(b) for b in batch.b]
    lora_expand(h, b, added, *batch.tiles, offset_start=0, add_inputs=True)
    lora_expand(h, b, written, *batch.tiles)

    exact_h = exact_shrink(batch.x, batch.a, batch.token_slots, full, 2.0)
    expected = exact_expand(exact_h, batch.b, batch.y, batch.token_slots, full)
    overwritten = torch.where(batch.is_adapter[:, None], expected - batch.y.double(), batch.y.double())
    assert relative_error(h, exact_h) < 1e-6
    assert relative_error(added, expected) < 3e-6
    assert relative_error(written, overwritten) < 3e-6


def test_an_expand_may_begin_at_a_later_column():
    batch = Batch((20, 3, 8, 16, [24]), torch.float32)
    wide = random(20, 40, seed=3)

    y = guarded(wide)
    lora_expand(
        batch.h.to(DEVICE), [b.to(DEVICE) for b in batch.b], y, *batch.tiles, offset_start=9, add_inputs=True
    )

    full = [[batch.rank] * batch.slots]
    expected = wide.double()
    expected[:, 9:33] = exact_expand(batch.h, batch.b, wide[:, 9:33], batch.token_slots, full)
    assert relative_error(y, expected) < 3e-6


@pytest.mark.lab("4.2")
@pytest.mark.lab("4.3")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_another_order_give_the_same_bits(dtype):
    batch = Batch((50, 6, 16, 200, [70, 30]), dtype)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(5))

    def product(rows):
        tiles = tile_list(batch.token_slots[rows], batch.slots)
        y, ranks = guarded(batch.y[rows]), on_device(batch.ranks)
        expand(shrink(guarded(batch.x[rows]), batch.live_a, tiles, ranks), batch.live_b, y, tiles, ranks)
        return y.cpu()

    in_order, shuffled = product(torch.arange(50)), product(order)

    assert torch.equal(product(torch.arange(50)), in_order)
    if DEVICE == "cuda":
        assert torch.equal(shuffled, in_order[order])
    else:  # numpy, which does the interpreter's products, sums in an order that depends on a row's place
        assert relative_error(shuffled, in_order[order].double()) < TOLERANCE[dtype]


def test_a_batch_of_base_rows_changes_nothing():
    batch = Batch((20, 3, 8, 32, [24]), torch.float32)
    tiles, ranks = tile_list(torch.full((20,), -1), 3), on_device(batch.ranks)

    y = guarded(batch.y)
    expand(shrink(guarded(batch.x), batch.live_a, tiles, ranks), batch.live_b, y, tiles, ranks)

    assert torch.equal(y.cpu(), batch.y)


def test_large_tiles_of_long_batches_are_right_too():
    batch = Batch((600, 3, 8, 32, [24, 8]), torch.float32)
    assert batch.tiles.block_rows == 64

    y, ranks = guarded(batch.y), on_device(batch.ranks)
    expand(shrink(guarded(batch.x), batch.live_a, batch.tiles, ranks), batch.live_b, y, batch.tiles, ranks)

    h = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks)
    assert relative_error(y, exact_expand(h, batch.b, batch.y, batch.token_slots, batch.ranks)) < 3e-6


@needs_cuda
def test_a_captured_graph_holds_for_another_mixture_of_its_size():
    batch = Batch((40, 4, 16, 160, [64, 16, 16]), torch.bfloat16)
    meta = LoRAKernelMeta.make(4, 40, DEVICE)
    meta.prepare_tensors(batch.token_slots)
    x, y, ranks = guarded(batch.x), guarded(batch.y), on_device(batch.ranks)

    def run():
        tiles = meta.meta_args(40)
        expand(shrink(x, batch.live_a, tiles, ranks), batch.live_b, y, tiles, ranks)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (7, 8):
        token_slots = random_slots(40, 4, seed=seed)
        meta.prepare_tensors(token_slots)
        y.copy_(batch.y)
        graph.replay()

        h = exact_shrink(batch.x, batch.a, token_slots, batch.ranks)
        expected = exact_expand(h, batch.b, batch.y, token_slots, batch.ranks)
        assert relative_error(y, expected) < TOLERANCE[torch.bfloat16]
