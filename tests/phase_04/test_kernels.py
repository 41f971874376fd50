"""The shrink kernel (lab 4.2) and the expand kernel (lab 4.3), against float64, with NaN around every buffer."""

import numpy as np
import pytest
import torch

import minivllm.gpu.sgmv.lora_expand_op as lora_expand_op
from minivllm.gpu.sgmv import LoRAKernelMeta, expand, lora_expand, lora_shrink, shrink, tuning
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.memory import (
    DTYPES,
    TOLERANCE,
    assert_rows_close,
    by_row,
    exact_expand,
    exact_shrink,
    guard,
    guarded,
    live_part,
    random,
    random_slots,
)

# tokens, slots, rank, K, widths: powers of two and anything but. The first are small, and grade.
SMALL = [
    (1, 1, 8, 64, [48]),
    (5, 3, 5, 37, [19]),
    (20, 3, 16, 160, [24, 16, 16]),
    (9, 6, 20, 150, [130, 70]),
]
LARGE = [
    (40, 4, 16, 160, [64, 16, 16]),
    (33, 9, 24, 300, [130, 70]),
    (70, 2, 64, 96, [40, 40]),
    (3, 3, 200, 48, [33]),
]


def name_of(shape):
    tokens, slots, rank, width, widths = shape
    return "-".join(map(str, (tokens, slots, rank, width, *widths)))


def shapes(exercise):
    """All of them; the small ones carry the exercise's mark."""
    graded = [pytest.param(shape, marks=pytest.mark.lab(exercise), id=name_of(shape)) for shape in SMALL]
    return [*graded, *(pytest.param(shape, id=name_of(shape)) for shape in LARGE)]


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
        # Rows of A and B may be further apart than they are long, as in a table of all layers.
        self.live_a = [guarded(live_part(a, r, 0), row_gap=5) for a, r in zip(self.a, self.ranks)]
        self.live_b = [guarded(live_part(b, r, 1), row_gap=3) for b, r in zip(self.b, self.ranks)]
        self.is_adapter = self.token_slots >= 0

    def live_h(self, h):
        """A copy of h in which base rows, and what is past each row's rank, are NaN.   h: (n, T, R)"""
        h = h.clone()
        for i, ranks in enumerate(self.ranks):
            for row, slot in enumerate(self.token_slots.tolist()):
                h[i, row, ranks[slot] if slot >= 0 else 0 :] = float("nan")
        return h


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", shapes("4.2"))
def test_the_planes_of_a_shrink_add_up_to_every_rows_own_product(shape, dtype, splits):
    """INCIDENTS 1 and 13: rows of the last slot among them; base rows of h are not written."""
    batch = Batch(shape, dtype)
    n = len(batch.widths)
    h = guard(torch.full((splits, n, batch.tokens, batch.rank), float("nan")))

    x, planes = guarded(batch.x, row_gap=7), h.view.view(splits, n, batch.tokens, batch.rank)
    shrink(x, batch.live_a, batch.tiles, on_device(batch.ranks), 0.5, h=planes)

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks, 0.5)
    expected[:, ~batch.is_adapter] = float("nan")
    what = f"h, {splits} planes added up"
    assert_rows_close(by_row(planes.sum(0)), by_row(expected), batch.token_slots, 2e-6, what)
    h.assert_written_only_where(batch.is_adapter.repeat(splits * n)[:, None])


@pytest.mark.lab("4.2")
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_every_block_of_a_wide_x_is_in_one_plane(splits):
    """K has more blocks here than there are planes: block k is summed in plane k modulo splits, and in no other."""
    batch = Batch((3, 2, 8, 900, [16]), torch.float32, base_share=0)
    block_k = tuning.shrink_tiles(3, 900, 8, batch.tiles.count).block_k
    assert splits * block_k < 900, "for this test K must have more blocks than planes"

    h = shrink(guarded(batch.x), batch.live_a, batch.tiles, on_device(batch.ranks), splits=splits)

    plane_of_column = torch.arange(900) // block_k % splits
    for plane in range(splits):
        share = torch.where(plane_of_column == plane, batch.x, 0)
        expected = exact_shrink(share, batch.a, batch.token_slots, batch.ranks)
        assert_rows_close(
            by_row(h[plane]), by_row(expected), batch.token_slots, 2e-6, f"plane {plane} of {splits}"
        )


@pytest.mark.lab("4.2")
def test_a_shrink_of_more_planes_than_there_is_to_split_leaves_zeros_in_them():
    batch = Batch((4, 2, 8, 40, [16]), torch.float32)
    h = guarded(torch.full((4, 1, 4, 8), float("nan")))

    shrink(guarded(batch.x), batch.live_a, batch.tiles, on_device(batch.ranks), h=h)

    expected = torch.where(batch.is_adapter[None, :, None], torch.zeros(3, 4, 8), float("nan"))
    assert_rows_close(by_row(h[1:, 0]), by_row(expected), batch.token_slots, 0, "planes past the first")


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", shapes("4.3"))
def test_an_expand_adds_every_rows_own_product_and_leaves_base_rows_alone(shape, dtype, planes):
    batch = Batch(shape, dtype)
    parts = [random(*batch.h.shape, seed=50 + i) for i in range(planes - 1)]
    parts.append(batch.h - sum(parts))
    h = torch.stack([batch.live_h(part) for part in parts])

    y = guard(batch.y, row_gap=5)
    expand(guarded(h), batch.live_b, y.view, batch.tiles, on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y.view, expected, batch.token_slots, TOLERANCE[dtype])
    y.assert_written_only_where(batch.is_adapter[:, None])


@pytest.mark.lab("4.3")
def test_planes_are_added_up_before_they_are_rounded():
    """Shares of a sum may be large and cancel. In float16 each of these alone is off by a quarter."""
    batch = Batch((5, 2, 8, 16, [20, 9]), torch.float16)
    share = 700 * random(*batch.h.shape, seed=50)

    y = guarded(batch.y)
    h = guarded(torch.stack([batch.live_h(share), batch.live_h(batch.h - share)]))
    expand(h, batch.live_b, y, batch.tiles, on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, TOLERANCE[torch.float16])


@pytest.mark.lab("4.3")
def test_an_expand_may_overwrite():
    batch = Batch((5, 2, 8, 16, [20, 9]), torch.float32)

    y = guard(batch.y, row_gap=5)
    h = guarded(batch.live_h(batch.h)[None])
    expand(h, batch.live_b, y.view, batch.tiles, on_device(batch.ranks), add_inputs=False)

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    expected -= torch.where(batch.is_adapter[:, None], batch.y, 0)
    assert_rows_close(y.view, expected, batch.token_slots, 3e-6)
    y.assert_written_only_where(batch.is_adapter[:, None])


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=name_of)
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
    assert_rows_close(by_row(h), by_row(exact_h), batch.token_slots, 1e-6, "h")
    assert_rows_close(added, expected, batch.token_slots, 3e-6, "y that is added to")
    assert_rows_close(written, overwritten, batch.token_slots, 3e-6, "y that is overwritten")


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
    assert_rows_close(y, expected, batch.token_slots, 3e-6)


@pytest.mark.lab("4.2")
def test_a_shrink_that_is_told_no_ranks_reads_all_rows_of_a():
    batch = Batch((5, 2, 8, 16, [20]), torch.float32)
    full = [[batch.rank] * batch.slots]

    h = shrink(guarded(batch.x), [guarded(a) for a in batch.a], batch.tiles).sum(0)

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, full)
    rows = batch.is_adapter
    assert_rows_close(by_row(h)[rows], by_row(expected)[rows], batch.token_slots[rows], 2e-6, "h")


@pytest.mark.lab("4.3")
def test_an_expand_that_is_told_no_ranks_reads_all_columns_of_b():
    batch = Batch((5, 2, 8, 16, [20, 9]), torch.float32)
    full = [[batch.rank] * batch.slots] * 2

    y = guarded(batch.y)
    expand(guarded(batch.h[None]), [guarded(b) for b in batch.b], y, batch.tiles)

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, full)
    assert_rows_close(y, expected, batch.token_slots, 3e-6)


@pytest.mark.lab("4.3")
def test_slices_that_fill_their_blocks_have_no_block_more():
    from minivllm.gpu.sgmv.tuning import expand_tiles

    block = expand_tiles(3, 4, 1).block_n
    batch = Batch((3, 2, 4, 16, [block, 2 * block, block]), torch.float32)

    y = guarded(batch.y)
    expand(guarded(batch.live_h(batch.h)[None]), batch.live_b, y, batch.tiles, on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, 3e-6)


def with_rubbish(tiles):
    """A tile list in which what is no tile (slot -1) names rows all the same: it may."""
    numbers = tiles.tiles.clone()
    numbers[1:, numbers[0] < 0] = torch.tensor([[0], [2]], dtype=numbers.dtype, device=numbers.device)
    assert (numbers[0, : tiles.count] < 0).any(), "every tile that is launched has rows"
    return tiles._replace(tiles=numbers)


@pytest.mark.lab("4.2")
def test_a_shrink_of_what_is_no_tile_writes_nothing():
    batch = Batch((20, 3, 8, 32, [24]), torch.float32, base_share=0.6)
    h = guard(torch.full((1, 1, 20, 8), float("nan")))

    shrink(
        guarded(batch.x),
        batch.live_a,
        with_rubbish(batch.tiles),
        on_device(batch.ranks),
        h=h.view.view(1, 1, 20, 8),
    )

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks)
    expected[:, ~batch.is_adapter] = float("nan")
    assert_rows_close(by_row(h.view.view(1, 20, 8)), by_row(expected), batch.token_slots, 2e-6, "h")


@pytest.mark.lab("4.3")
def test_an_expand_of_what_is_no_tile_writes_nothing():
    batch = Batch((20, 3, 8, 32, [24, 9]), torch.float32, base_share=0.6)
    y = guarded(batch.y)

    expand(guarded(batch.h[None]), batch.live_b, y, with_rubbish(batch.tiles), on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, 3e-6)


@pytest.mark.lab("4.2")
@pytest.mark.lab("4.3")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_another_order_give_the_same_bits(dtype):
    """INCIDENTS 17."""
    batch = Batch((20, 3, 16, 140, [40, 30]), dtype)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5))

    def product(rows):
        tiles = tile_list(batch.token_slots[rows], batch.slots)
        y, ranks = guarded(batch.y[rows]), on_device(batch.ranks)
        expand(shrink(guarded(batch.x[rows]), batch.live_a, tiles, ranks), batch.live_b, y, tiles, ranks)
        return y.cpu()

    in_order, shuffled = product(torch.arange(20)), product(order)

    assert_rows_close(product(torch.arange(20)), in_order, batch.token_slots, 0, "y once more")
    # numpy, which does the interpreter's products, sums in an order that depends on a row's place
    tolerance = 0 if DEVICE == "cuda" else TOLERANCE[dtype]
    assert_rows_close(shuffled, in_order[order], batch.token_slots[order], tolerance, "y, rows shuffled")


@pytest.mark.lab("4.2")
@pytest.mark.lab("4.3")
@pytest.mark.skipif(
    DEVICE == "cuda", reason="the interpreter tells what a product was asked for; a GPU shows it"
)
def test_products_are_not_rounded_to_tf32(monkeypatch):
    from triton.runtime import interpreter

    asked, builder = [], interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def noted(self, a, b, d, input_precision, *others):
        asked.append(input_precision.name)
        return create_dot(self, a, b, d, input_precision, *others)

    monkeypatch.setattr(builder, "create_dot", noted)
    batch = Batch((5, 2, 8, 16, [20, 9]), torch.float32)
    ranks = on_device(batch.ranks)

    h = shrink(guarded(batch.x), batch.live_a, batch.tiles, ranks)
    of_shrink = set(asked)
    expand(h, batch.live_b, guarded(batch.y), batch.tiles, ranks)

    assert of_shrink == set(asked) == {"IEEE"}, 'tl.dot needs input_precision="ieee"'


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
    expected = exact_expand(h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, 3e-6)


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
        assert_rows_close(y, expected, token_slots, TOLERANCE[torch.bfloat16])


def far_apart(weights, folder):
    """(S, rows, columns) copied into memory where slots are 2**30 elements apart: a file of which little is there.

    An offset that has lost its upper bits leads to zeros: there is as much memory before slot 0 as behind it.
    """
    file = folder / "memory"
    memory = torch.from_file(str(file), shared=True, size=2**32 + 2**20, dtype=torch.float16)
    file.unlink()  # the memory stays
    view = memory.as_strided(weights.shape, (2**30, weights.shape[2], 1), storage_offset=2**31)
    view.copy_(weights)
    return view


def narrow(tiles):
    """The same list in int32."""
    return tiles._replace(rows=tiles.rows.int(), tiles=tiles.tiles.int())


@pytest.mark.lab("4.2")
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory is taken when it is asked for")
def test_a_shrink_finds_slots_whose_offsets_do_not_fit_in_32_bits(tmp_path):
    batch = Batch((4, 3, 4, 16, [8]), torch.float16)

    h = shrink(
        batch.x, [far_apart(batch.a[0], tmp_path)], narrow(batch.tiles), on_device(batch.ranks), splits=1
    )

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks)
    rows = batch.is_adapter
    assert_rows_close(by_row(h[0])[rows], by_row(expected)[rows], batch.token_slots[rows], 2e-6, "h")


@pytest.mark.lab("4.3")
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory is taken when it is asked for")
def test_an_expand_finds_slots_whose_offsets_do_not_fit_in_32_bits(tmp_path):
    batch = Batch((4, 3, 4, 16, [8]), torch.float16)
    y = batch.y.clone()

    expand(batch.h[None], [far_apart(batch.b[0], tmp_path)], y, narrow(batch.tiles), on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, TOLERANCE[torch.float16])


def rows_far_apart(x, folder):
    """(T, columns) likewise, with rows 2**30 elements apart."""
    return far_apart(x[:, None], folder)[:, 0]


@pytest.mark.lab("4.2")
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory is taken when it is asked for")
def test_a_shrink_finds_rows_whose_offsets_do_not_fit_in_32_bits(tmp_path):
    batch = Batch((3, 1, 4, 16, [8]), torch.float16, base_share=0)

    h = shrink(
        rows_far_apart(batch.x, tmp_path), batch.a, narrow(batch.tiles), on_device(batch.ranks), splits=1
    )

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks)
    assert_rows_close(by_row(h[0]), by_row(expected), batch.token_slots, 2e-6, "h")


@pytest.mark.lab("4.3")
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory is taken when it is asked for")
def test_an_expand_finds_rows_whose_offsets_do_not_fit_in_32_bits(tmp_path):
    batch = Batch((3, 1, 4, 16, [8]), torch.float16, base_share=0)
    y = rows_far_apart(batch.y, tmp_path)

    expand(batch.h[None], batch.b, y, narrow(batch.tiles), on_device(batch.ranks))

    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, TOLERANCE[torch.float16])


@pytest.fixture
def masked_places_are_nan(monkeypatch):
    """What a masked load without `other` gives where the mask is False: on a GPU it may be anything, here it is NaN."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    load = builder.create_masked_load

    def masked_load(ptrs, mask, other, *options):
        if other is None and np.issubdtype(
            found := interpreter._get_np_dtype(ptrs.get_element_ty()), np.floating
        ):
            other = interpreter.TensorHandle(
                np.full_like(ptrs.data, np.nan, dtype=found), ptrs.get_element_ty()
            )
        return load(ptrs, mask, other, *options)

    monkeypatch.setattr(builder, "create_masked_load", masked_load)


@pytest.mark.lab("4.2")
@pytest.mark.lab("4.3")
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's masked places hold what they hold")
def test_what_a_mask_leaves_out_is_in_no_product(masked_places_are_nan):
    batch = Batch((5, 3, 5, 37, [19]), torch.float32, base_share=0)

    h = shrink(batch.x, batch.live_a, batch.tiles, on_device(batch.ranks), splits=1)
    y = batch.y.clone()
    expand(batch.h[None], batch.live_b, y, batch.tiles, on_device(batch.ranks))

    expected = exact_shrink(batch.x, batch.a, batch.token_slots, batch.ranks)
    assert_rows_close(by_row(h[0]), by_row(expected), batch.token_slots, 2e-6, "h")
    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, TOLERANCE[torch.float32])


@pytest.mark.lab("4.3")
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs one program after the other")
def test_every_program_of_an_expand_waits_and_reads_h_after_that(monkeypatch):
    """Also those of a tile that is none: what comes after this kernel relies on it."""
    from triton.runtime import interpreter

    batch = Batch((20, 3, 8, 32, [24, 9]), torch.float32, base_share=0.6)
    tiles, h, y = with_rubbish(batch.tiles), torch.full_like(batch.h, float("nan")), batch.y.clone()
    begun, waited = [], []
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx

    def begin_program(*place):
        begun.append(place)
        h.fill_(float("nan"))
        begin(*place)

    def wait():
        waited.append(begun[-1])
        h.copy_(batch.h)

    monkeypatch.setattr(builder, "set_grid_idx", begin_program)
    monkeypatch.setattr(lora_expand_op.tl.extra.cuda, "gdc_wait", wait)
    monkeypatch.setattr(lora_expand_op, "can_overlap", lambda device: True)

    expand(h[None], batch.b, y, tiles, on_device(batch.ranks))

    assert set(waited) == set(begun), "each program calls tl.extra.cuda.gdc_wait()"
    expected = exact_expand(batch.h, batch.b, batch.y, batch.token_slots, batch.ranks)
    assert_rows_close(y, expected, batch.token_slots, 3e-6)
