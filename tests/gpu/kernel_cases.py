"""Every kernel of the package on shapes at the edges, amid poison; each case is checked against float64.

A case is a function that runs kernels in a `Sanitizer`'s sight and returns what they wrote.
"""

import functools
import itertools

import pytest
import torch
import triton
from test_layer_kernels import DEFAULT_ROPE, rms
from test_mixed_attention_kernel import filled_buffers
from test_paged_attention_kernels import SCALE, single_tokens
from test_paged_attention_kernels import Batch as Contexts
from test_paged_lora_kernels import Batch as PagedAdapters
from test_paged_lora_kernels import room_of_nan

from minivllm.gpu.kernels import (
    activation,
    adapted_norm_op,
    adapted_rotary_op,
    adapted_silu_op,
    attention,
    invariant_linear,
    likeliest,
    norm,
    paged_expand_op,
    paged_shrink_op,
    rotary,
    stand_ins,
)
from minivllm.gpu.kernels.paged_tuning import (
    adapted_norm_tiles,
    adapted_rotary_tiles,
    adapted_silu_tiles,
    paged_expand_tiles,
    paged_shrink_tiles,
)
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.sgmv import LoRAKernelMeta, lora_expand_op, lora_shrink_op, write_slot_op
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.parallel.peers import gather_op, norm_op, sum_op
from tests.oracles.rotary import rotated
from tests.tools.device import DEVICE
from tests.tools.memory import (
    Guarded,
    assert_rows_close,
    by_row,
    exact_expand,
    exact_shrink,
    guard,
    guarded,
    live_part,
    random,
)
from tests.worlds.peers import Peers, parts_of

NAN = float("nan")
CLOSE = 3e-6  # float32, as a share of the largest value


def numbers(values, dtype=torch.int32):
    """(n,) integers amid others that would lead far away."""
    return Guarded(torch.as_tensor(values, dtype=dtype)[None], 0, DEVICE).view[0]


def mixture(tokens, adapters, kind):
    """(T,) adapter of each row: all of them and base rows in no order, the last adapter alone, or base rows alone."""
    if kind == "base":
        return torch.full((tokens,), -1)
    if kind == "last":
        return torch.full((tokens,), adapters - 1)
    in_turns = torch.arange(tokens) % (adapters + 1) - 1
    picks = in_turns[torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))]
    picks[-1] = adapters - 1
    return picks


def tile_list(picks, adapters):
    """With room for a larger batch. What is no tile (slot -1) names rows that are none."""
    meta = LoRAKernelMeta.make(adapters, len(picks) + 40, DEVICE)
    meta.prepare_tensors(picks)
    tiles = meta.meta_args(len(picks))
    found = tiles.tiles.clone()
    found[1:, found[0] < 0] = torch.tensor([[-5], [-7]], dtype=found.dtype, device=found.device)
    return tiles._replace(tiles=found)


def assert_close(found, expected, tolerance=CLOSE):
    assert not found.isnan().any(), "NaN: something was read outside, or left unwritten"
    assert (found.double().cpu() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def overlapping(sanitizer, case, module):
    """A case whose kernel may begin before the one ahead has ended."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(module, "can_overlap", lambda device: True)
        return case(sanitizer)


# ---- adapters in slots --------------------------------------------------------------------------------------


def slots(sanitizer, tokens, slots, rank, width, heights, kind="mixed", splits=2):
    """Shrink and expand; every slot has another rank, some none."""
    picks = mixture(tokens, slots, kind)
    full = (rank, 0, 1, max(1, rank - 1), rank // 2)
    ranks = [[full[(slots - 1 - slot + 2 * i) % 5] for slot in range(slots)] for i in range(len(heights))]
    a = [random(slots, rank, width, seed=i) for i in range(len(heights))]
    b = [random(slots, height, rank, seed=10 + i) for i, height in enumerate(heights)]
    x, y = random(tokens, width, seed=20), random(tokens, sum(heights), seed=21)
    tiles = tile_list(picks, slots)
    on_device = Guarded(torch.tensor(ranks, dtype=torch.int32), 0, DEVICE).view
    h, out = guard(torch.full((splits, len(heights), tokens, rank), NAN)), guard(y, row_gap=3)
    planes = h.view.view(splits, len(heights), tokens, rank)
    live_a = [guarded(live_part(one, of, 0), row_gap=5) for one, of in zip(a, ranks)]
    live_b = [guarded(live_part(one, of, 1), row_gap=3) for one, of in zip(b, ranks)]

    sanitizer.late = [h.view, out.view]

    with sanitizer.watching():
        lora_shrink_op.shrink(guarded(x, row_gap=7), live_a, tiles, on_device, 0.5, h=planes)
        lora_expand_op.expand(planes, live_b, out.view, tiles, on_device)

    exact_h = exact_shrink(x, a, picks, ranks, 0.5)
    rows = picks >= 0
    h.assert_written_only_where(rows.repeat(splits * len(heights))[:, None])
    out.assert_written_only_where(rows[:, None])
    assert_rows_close(by_row(planes.sum(0))[rows], by_row(exact_h)[rows], picks[rows], CLOSE, "h")
    assert_rows_close(out.view, exact_expand(exact_h, b, y, picks, ranks), picks, 2 * CLOSE)
    return out.view


def guarded_ints(values):
    """The same, of two dimensions."""
    return Guarded(values, 2, DEVICE).view


def write_slot(sanitizer, shapes, slot, slots=3):
    """Pieces into places that are as large, larger in either direction, or get nothing.

    shapes   (rows, columns) of a place, then of its piece
    """
    buffers = [guard(random(slots, *place, seed=i), row_gap=2) for i, (place, _) in enumerate(shapes)]
    pieces = [random(*piece, seed=50 + i) for i, (_, piece) in enumerate(shapes)]
    ends = torch.tensor([piece.numel() for piece in pieces]).cumsum(0)
    sources = [[end - piece.numel(), *piece.shape] for end, piece in zip(ends.tolist(), pieces)]
    views = [buffer.view.unflatten(0, (slots, -1)) for buffer in buffers]
    places = [[view.data_ptr(), *view.stride(), *view.shape[1:]] for view in views]
    weights = guarded(torch.cat([piece.flatten() for piece in pieces])[None])[0]
    sanitizer.reach = [view[slot] for view in views]
    largest = max(place[0] * place[1] for place, _ in shapes)

    with sanitizer.watching():
        tables = [guarded_ints(torch.tensor(table)).contiguous() for table in (sources, places)]
        write_slot_op.write_slot(weights, *tables, slot, largest)

    for buffer, view, piece in zip(buffers, views, pieces):
        rows, columns = piece.shape
        expected = torch.zeros(view.shape[1:])
        expected[:rows, :columns] = piece
        assert torch.equal(view[slot].cpu(), expected)
        is_slot = torch.arange(slots).repeat_interleave(view.shape[1]) == slot
        buffer.assert_written_only_where(is_slot[:, None])
    return torch.cat([view.flatten() for view in views])


def exchanges(sanitizer, rank, size, calls, parts, run, more=None):
    """As many calls of a rank's kernel as use its halves twice. Programs of odd numbers are a turn ahead of others.

    parts   of each rank, what each of its programs sends    more   likewise, of float32
    run     (exchange) -> what the kernel wrote

    The other ranks' numbers are there before each call, and after it the rank's own are at all others.
    """
    programs = len(parts[0])
    begun = [program % 2 for program in range(programs)]
    peers, found = Peers(size, programs, begun), []
    peers.stop.fill_(1)  # all it waits for is there; what is not would never come
    sanitizer.reach += peers.buffers
    for i in range(calls):
        expected = Peers(size, programs, [turn ^ (i & 1) for turn in begun])
        for other in range(size):
            if other != rank:
                peers.turns[other].copy_(expected.turns[other])
                peers.post(other, rank, parts[other], more and more[other])
                expected.post(rank, other, parts[rank], more and more[rank])
        with sanitizer.watching():
            found.append(run(peers.exchange_of(rank)))
        assert peers.holds(expected)
        assert peers.turns[rank].tolist() == [turn ^ 1 for turn in expected.turns[rank].tolist()]
        for buffers in peers.buffers:
            buffers.zero_()
    return torch.stack(found)


def sum_of_ranks(sanitizer, rank, size, n):
    terms = random(size, n, seed=n)
    terms[:, ::7] = 0
    x = guarded(terms[rank][None])[0]

    found = exchanges(
        *(sanitizer, rank, size, 4, [parts_of(one) for one in terms]),
        lambda exchange: sum_op.peer_sum(x, exchange, looks=2),
    )

    assert all(torch.equal(one.cpu(), functools.reduce(torch.add, terms)) for one in found)
    return found


def gather_of_ranks(sanitizer, rank, size, rows, width):
    parts = random(size, rows, width, seed=rows * width)
    x = guarded(parts[rank].view(1, -1))[0].view(rows, width)

    found = exchanges(
        *(sanitizer, rank, size, 4, [parts_of(one) for one in parts]),
        lambda exchange: gather_op.peer_gather(x, exchange, looks=2),
    )

    assert all(torch.equal(one.cpu(), torch.cat(list(parts), dim=1)) for one in found)
    return found


def norm_of_ranks(sanitizer, rank, size, rows, width):
    weight, terms, stream = random(width, seed=3), random(size, rows, width, seed=width), random(rows, width)
    x, total = guarded(terms[rank], row_gap=4), functools.reduce(torch.add, terms) + stream

    def run(exchange):
        residual = guard(stream, row_gap=4)
        of_norm = residual.view, numbers(weight, torch.float32), 1e-3, exchange
        found = norm_op.peer_norm(x, *of_norm, looks=2)
        assert torch.equal(residual.view.cpu(), total)
        residual.assert_intact()
        return found

    found = exchanges(sanitizer, rank, size, 3, terms, run)

    for one in found:
        assert_close(one, rms(total, weight, 1e-3))
    return found


# ---- adapters in pages --------------------------------------------------------------------------------------


class Pages(PagedAdapters):
    """As there, but past a slot's pages its table leads far away."""

    def __init__(self, sanitizer, shape, experts=1, kind="mixed"):
        with sanitizer.watching():
            super().__init__(shape, torch.float32, experts, sanitizer.reach.append)
        assert torch.equal(self.pieces.pool.nan_to_num(7e7), self.written().nan_to_num(7e7))
        self.adapters = mixture(self.tokens, len(self.table) * experts, kind)
        self.tiles = tile_list(self.adapters, len(self.table) * experts)
        longest = torch.tensor(self.ranks).amax(0)  # (S,)
        begins = torch.arange(self.table.shape[1]) * self.page_ranks
        table = torch.where(begins < longest[:, None], self.table, 10**9).int()
        self.pieces = self.pieces._replace(
            table=guarded_ints(table), ranks=guarded_ints(self.pieces.ranks.cpu())
        )
        sanitizer.reach.clear()

    def written(self):
        """The pool with every live rank in its place, and NaN everywhere else."""
        pieces, pool = self.pieces, torch.full_like(self.pieces.pool, NAN)
        for i, slot in itertools.product(range(len(self.a)), range(len(self.table))):
            for expert, rank in itertools.product(range(self.experts), range(self.ranks[i][slot])):
                page = self.table[slot, rank // self.page_ranks] * pieces.page_stride
                line = expert * self.page_ranks + rank % self.page_ranks
                both = self.a[i][slot, expert, rank], self.b[i][slot, expert, :, rank]
                for values, first in zip(both, (pieces.a[i], pieces.b[i])):
                    place = page + first + line * len(values)
                    pool[place : place + len(values)] = values
        return pool


def pages(
    sanitizer, tokens, rank, page_ranks, width, heights, kind="mixed", experts=1, many=False, block_r=64
):
    """Written, then shrunk in several planes and expanded.

    many      with the tile sizes of prompts
    block_r   no more ranks at a time in the expand
    """
    batch = Pages(sanitizer, (tokens, rank, width, heights, page_ranks), experts, kind)
    size = 4096 if many else 1
    tuned = paged_shrink_tiles(size, width, rank)._replace(splits=3, block_k=32)
    expand_tiles = at_most(block_r, paged_expand_tiles(size, rank, max(heights)))
    room, y = room_of_nan(batch, tuned), guard(batch.y, row_gap=3)
    sanitizer.late = [room.h, y.view]

    with sanitizer.watching():
        x = guarded(batch.x, row_gap=5)
        h = paged_shrink_op.paged_shrink(x, batch.pieces, batch.tiles, room, tuned)
        paged_expand_op.paged_expand(h, batch.pieces, y.view, batch.tiles, expand_tiles)

    assert not room.counts.any(), "the next shrink counts on from these"
    live = torch.tensor(batch.ranks)[:, batch.adapters // experts] * (batch.adapters >= 0)
    assert torch.equal(h.isnan().cpu(), torch.arange(rank) >= live[:, :, None])
    y.assert_written_only_where((batch.adapters >= 0)[:, None])
    assert_close(y.view, batch.expected()[1], 2 * CLOSE)
    return torch.cat([h.flatten(), y.view.flatten()])


def at_most(block_r, tiles):
    return tiles._replace(block_r=min(block_r, tiles.block_r))


def gated(sanitizer, tokens, rank, page_ranks, width, inner, kind="mixed", many=False, block_r=64):
    """Gate and up into the activation."""
    batch = Pages(sanitizer, (tokens, rank, width, [inner] * 2, page_ranks), kind=kind)
    tuned = paged_shrink_tiles(tokens, width, rank)
    y = guard(batch.y, row_gap=3)
    x, room = batch.x.to(DEVICE), room_of_nan(batch, tuned)
    sanitizer.late = [room.h, y.view]

    with sanitizer.watching():
        h = paged_shrink_op.paged_shrink(x, batch.pieces, batch.tiles, room, tuned)
        tiles = at_most(block_r, adapted_silu_tiles(4096 if many else 1, rank))
        out = adapted_silu_op.adapted_silu(Update(h, batch.pieces), y.view, batch.tiles, tiles)

    y.assert_written_only_where(torch.tensor(False))
    gate, up = batch.expected()[1].chunk(2, dim=1)
    assert_close(out, torch.nn.functional.silu(gate) * up, 2 * CLOSE)
    return out


def normed(sanitizer, tokens, rank, page_ranks, width, size, kind="mixed", block_r=64, ranks=1):
    """A row of pages' B into the norm that reads the product.

    block_r   no more ranks at a time
    ranks     of how many processes
    """
    batch = Pages(sanitizer, (tokens, rank, width, [size], page_ranks), kind=kind)
    tuned = paged_shrink_tiles(tokens, width, rank)
    x, room = batch.x.to(DEVICE), room_of_nan(batch, tuned)

    with sanitizer.watching():
        h = paged_shrink_op.paged_shrink(x, batch.pieces, batch.tiles, room, tuned)
    update = Update(h, batch.pieces)
    of_row = batch.y, batch.adapters, batch.expected()[1], block_r
    if ranks == 1:
        return normed_row(sanitizer, update, *of_row)
    return normed_row_of_ranks(sanitizer, update, h[0], *of_row, ranks)


def normed_row(sanitizer, update, y, picks, expected, block_r):
    """expected: y and what adapters add, in float64"""
    residual, weight = random(*y.shape, seed=40), random(y.shape[1], seed=41)
    product, stream = guard(y, row_gap=3), guard(residual, row_gap=5)
    sanitizer.late = [update.h, product.view]

    with sanitizer.watching():
        args = numbers(weight, torch.float32), 1e-3, product.view, stream.view
        tiles = at_most(block_r, adapted_norm_tiles(y.shape[1], update.pieces.rank, y.itemsize))
        out = adapted_norm_op.adapted_norm(update, numbers(picks, torch.int64), *args, tiles)

    product.assert_written_only_where(torch.tensor(False))
    stream.assert_intact()
    assert_close(stream.view, residual.double() + expected, 2 * CLOSE)
    assert_close(out, rms(residual.double() + expected, weight, 1e-3), 4 * CLOSE)
    return torch.cat([out.flatten(), stream.view.flatten()])


def normed_row_of_ranks(sanitizer, update, h, y, picks, expected, block_r, size):
    """As `normed_row`, of the last rank. What others have are multiples of its h and y.

    h   (T, R) of each row, NaN past the live rank
    """
    times = torch.tensor([0.5, -3.0, 1.0])[-size:]
    residual, weight = random(*y.shape, seed=40), random(y.shape[1], seed=41)
    product, stream = guard(y, row_gap=3), guard(residual, row_gap=5)
    h = [row[~row.isnan()] for row in h.cpu()]
    tiles = at_most(block_r, adapted_norm_tiles(y.shape[1], update.pieces.rank, y.itemsize))
    slots, weights = numbers(picks, torch.int64), numbers(weight, torch.float32)

    (out,) = exchanges(
        *(sanitizer, size - 1, size, 1, [factor * y for factor in times]),
        lambda exchange: norm_op.peer_norm(
            product.view, stream.view, weights, 1e-3, exchange, update, slots, tiles, looks=2
        ),
        more=[[factor * row for row in h] for factor in times],
    )

    product.assert_written_only_where(torch.tensor(False))
    stream.assert_intact()
    total = residual.double() + times.sum() * expected
    assert_close(stream.view, total, 2 * CLOSE)
    assert_close(out, rms(total, weight, 1e-3), 4 * CLOSE)
    return torch.cat([out.flatten(), stream.view.flatten()])


def turned(
    sanitizer, tokens, rank, page_ranks, heads, width=40, kind="mixed", many=False, block_r=64, parts=3
):
    """q, k and v into rotary and cache.

    heads   Hq, Hkv, D
    parts   1 = one adapter for q, k and v
    """
    batch = Pages(sanitizer, (tokens, rank, width, heights_of(heads, parts), page_ranks), kind=kind)
    tuned = paged_shrink_tiles(tokens, width, rank)
    x, room = batch.x.to(DEVICE), room_of_nan(batch, tuned)

    with sanitizer.watching():
        h = paged_shrink_op.paged_shrink(x, batch.pieces, batch.tiles, room, tuned)
    update, picks = Update(h, batch.pieces), batch.adapters
    has_v = (torch.tensor(batch.ranks)[-1][picks] > 0) & (picks >= 0)
    tiles = at_most(block_r, adapted_rotary_tiles(4096 if many else 1, rank))
    return turned_rows(sanitizer, update, batch.y, batch.tiles, batch.expected()[1], heads, tiles, has_v)


def heights_of(heads, parts):
    num_heads, kv_heads, size = heads
    heights = [count * size for count in (num_heads, kv_heads, kv_heads)]
    return heights if parts == 3 else [sum(heights)]


def turned_rows(sanitizer, update, y, tile_rows, expected, heads, tiles, has_v):
    """expected: y and what adapters add, in float64   has_v: (T,) rows whose adapter adds to v

    The last two rows are padding, which shares slot 0 of the cache. The last slot is the cache's last.
    """
    (num_heads, kv_heads, size), tokens = heads, len(y)
    y = guard(y, row_gap=3)
    angles = random(tokens, 1, size // 2, seed=60).double()
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    mapping = 1 + torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(tokens))[:tokens]
    mapping[0] = 4 * (tokens // 4 + 2) - 1
    mapping[3:][-2:] = 0
    cache = Guarded(torch.full((tokens // 4 + 2, 4, 2 * kv_heads, size), NAN), 0, DEVICE)
    sanitizer.late, sanitizer.common = [update.h, y.view], [cache.view[:1, :1]]

    with sanitizer.watching():
        angle_rows = (guarded(part.float()[:, 0], row_gap=3)[:, None] for part in (cos, sin))
        places = numbers(mapping, torch.int64), cache.view
        rows = y.view.unflatten(1, (-1, size))
        adapted_rotary_op.adapted_rotary(update, rows, *angle_rows, *places, tile_rows, tiles)

    exact = rotated(expected.unflatten(1, (-1, size)), angles, num_heads + kv_heads)
    assert_close(rows, exact, 4 * CLOSE)
    is_value = torch.arange(exact[0].numel()) >= (num_heads + kv_heads) * size
    y.assert_written_only_where(~is_value | has_v[:, None])
    written = torch.zeros(4 * len(cache.view), 1, 1, dtype=torch.bool)
    written[mapping] = True
    cache.assert_written_only_where(written.unflatten(0, (-1, 4)))
    own = mapping > 0
    in_cache = cache.view.flatten(0, 1)[mapping[own].to(DEVICE)].cpu()
    assert torch.equal(in_cache, rows.cpu()[own, num_heads:])
    return torch.cat([y.view.flatten().cpu(), in_cache.flatten()])


# ---- attention ----------------------------------------------------------------------------------------------


def contexts(query_lens, seq_lens, heads, block_size):
    """Requests whose keys and values are in a cache, the last block of which is somebody's last."""
    batch = Contexts(query_lens, seq_lens, torch.float32, heads, block_size)
    used = -(-seq_lens[0] // block_size) - 1
    last = len(batch.kv_cache) - 1
    for table in batch.tables:
        table[:] = [batch.tables[0][used] if block == last else block for block in table]
    batch.tables[0][used] = last
    for row, length in enumerate(seq_lens):
        batch.write(row, 0, length)
    return batch


def decodes(sanitizer, seq_lens, heads=(6, 2, 16), block_size=4, max_seq_len=4096, padding=1):
    """padding: requests more than there are   max_seq_len: None = of the longest"""
    batch = contexts([1] * len(seq_lens), seq_lens, heads, block_size)
    count, widest = len(seq_lens) + padding, max(map(len, batch.tables))
    tables = torch.full((count, widest), 10**9, dtype=torch.int32)
    for row, (table, length) in enumerate(zip(batch.tables, seq_lens)):
        used = -(-length // block_size)
        tables[row, :used] = torch.tensor(table[:used])
    q = Guarded(torch.cat([*batch.q, batch.random(padding, heads[0])]), device=DEVICE)
    attention._counts.cache_clear()  # a kernel with a fault may have left some

    out = guard(torch.full((count, heads[0] * heads[2]), NAN))

    with sanitizer.watching():
        tiles = guarded_ints(single_tokens(range(count), [*seq_lens, *[0] * padding]))
        attention.paged_attention(
            q.view,
            batch.kv_cache,
            tiles,
            1,
            guarded_ints(tables),
            max_seq_len or max(seq_lens),
            SCALE,
            out.view,
        )
    out = out.view

    assert_close(out, torch.cat([batch.expected(), torch.zeros(padding, out.shape[1])]))
    of_heads = attention._counts(triton.next_power_of_2(count * heads[1]), out.device)
    assert not of_heads.any(), "the next step counts on from these"
    return out


def likeliest_tokens(sanitizer, rows, width):
    """The largest number in another block of each row, twice."""
    logits = random(rows, width, seed=width)
    places = [(row * 1023 + 7) % width for row in range(rows)]
    for row, place in enumerate(places):
        logits[row, place] = logits[row, -1] = 9.0
    kept, tokens = guard(torch.zeros_like(logits), row_gap=3), numbers([-1] * rows, torch.int64)

    with sanitizer.watching():
        likeliest.keep_likeliest(guard(logits, row_gap=5).view, kept.view, tokens)

    assert tokens.tolist() == places
    assert torch.equal(kept.view.cpu(), logits)
    return kept.view


def prompts(sanitizer, query_lens, seq_lens, heads=(6, 2, 16), block_size=4, padding=2):
    """Chunks of prompts among decodes, and rows of padding."""
    batch = contexts(query_lens, seq_lens, heads, block_size)
    tokens = sum(query_lens) + padding
    attn = filled_buffers(batch, padding)
    (tiles,) = attn.tiles
    q = Guarded(torch.cat([*batch.q, batch.random(padding, heads[0])]), device=DEVICE)

    out = guard(torch.full((tokens, heads[0] * heads[2]), NAN))

    with sanitizer.watching():
        attention.paged_attention(
            q.view, batch.kv_cache, *tiles, attn.block_tables, attn.max_seq_len, SCALE, out.view
        )
    out = out.view

    assert_close(out, torch.cat([batch.expected(), torch.zeros(padding, out.shape[1])]))
    return out


# ---- norms, activations, rotary -----------------------------------------------------------------------------


def norms(sanitizer, rows, size):
    x, residual, weight = (random(*shape, seed=i) for i, shape in enumerate([(rows, size)] * 2 + [(size,)]))
    inner, stream, heads = (guard(values, row_gap=3) for values in (x, residual, random(rows, 5 * size)))
    in_heads = heads.view.unflatten(1, (5, size))[:, 1:4]

    with sanitizer.watching():
        of_weight = numbers(weight, torch.float32)
        plain = norm.rms_norm(inner.view, of_weight, 1e-3)
        norm.rms_norm(in_heads, of_weight, 1e-3, out=in_heads)
        normed = norm.fused_add_rms_norm(inner.view, stream.view, of_weight, 1e-3)

    assert_close(plain, rms(x, weight, 1e-3))
    assert_close(normed, rms(x + residual, weight, 1e-3))
    assert torch.equal(stream.view.cpu(), x + residual)
    assert_close(in_heads, rms(random(rows, 5 * size).unflatten(1, (5, size))[:, 1:4], weight, 1e-3))
    inner.assert_written_only_where(torch.tensor(False))
    stream.assert_intact()
    is_head = torch.tensor([False, True, True, True, False]).repeat_interleave(size)
    heads.assert_written_only_where(is_head[None])
    return torch.cat([plain.flatten(), normed.flatten(), in_heads.flatten()])


def silu(sanitizer, rows, width):
    """Gates of 90 and -90: exp(90) is no float32, and the kernel knows what 1 over infinity is."""
    values = random(rows, 2 * width)
    values[0, width - 1], values[0, 0] = 90.0, -90.0
    gate_up = guard(values, row_gap=3)

    with sanitizer.watching():
        out = activation.silu_and_mul(gate_up.view)

    gate, up = values.double().chunk(2, dim=1)
    assert_close(out, torch.nn.functional.silu(gate) * up)
    gate_up.assert_written_only_where(torch.tensor(False))
    return out


def rotations(sanitizer, slot_mapping, num_heads, num_kv_heads, size):
    """Rows of padding share slot 0. The last slot is the cache's last."""
    tokens, total = len(slot_mapping), num_heads + 2 * num_kv_heads
    heads = Guarded(random(tokens, total, size), device=DEVICE)
    angles = RotaryEmbedding(size, 100, DEFAULT_ROPE, torch.float32, DEVICE)
    cos, sin = angles(torch.arange(tokens, device=DEVICE) * 3)
    cache = Guarded(torch.full((3, 4, 2 * num_kv_heads, size), NAN), 0, DEVICE)
    sanitizer.common = [cache.view[:1, :1]]

    with sanitizer.watching():
        slots = numbers(slot_mapping, torch.int64)
        rotary.rotary_and_cache(heads.view, cos, sin, slots, cache.view)

    found, kept = heads.view.cpu(), random(tokens, total, size)
    frequencies = 10000.0 ** -(torch.arange(0, size, 2).double() / size)
    turned_by = torch.arange(tokens)[:, None, None] * 3 * frequencies
    assert_close(found, rotated(kept, turned_by, num_heads + num_kv_heads))
    heads.assert_intact()
    written = torch.zeros(12, 1, 1, dtype=torch.bool)
    written[slot_mapping] = True
    cache.assert_written_only_where(written.unflatten(0, (3, 4)))
    own = [i for i, slot in enumerate(slot_mapping) if slot]
    in_cache = cache.view.cpu().flatten(0, 1)[[slot_mapping[i] for i in own]]
    assert torch.equal(in_cache, found[own, num_heads:])
    return torch.cat([found.flatten(), in_cache.flatten()])


# ---- the rest -----------------------------------------------------------------------------------------------


def linear(sanitizer, m, n, k, bias):
    x, weight = random(m, k, seed=1), random(n, k, seed=2)
    more = random(n, seed=3) if bias else None

    with sanitizer.watching():
        on_device = None if more is None else numbers(more, torch.float32)
        y = invariant_linear.invariant_linear(guarded(x, row_gap=3), guarded(weight, row_gap=3), on_device)

    assert_close(y, x.double() @ weight.double().T + (0 if more is None else more.double()))
    return y


def tokens_known_late(sanitizer, count):
    ids = torch.randint(-5, 50, (count,), generator=torch.Generator().manual_seed(count))
    tokens = [70, 71, 72, 73, 74]

    with sanitizer.watching():
        out = stand_ins.fill_in(numbers(ids, torch.int64), numbers(tokens, torch.int64))

    assert out.tolist() == [i if i >= 0 else tokens[-1 - i] for i in ids.tolist()]
    return out
