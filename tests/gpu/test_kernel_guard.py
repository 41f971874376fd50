"""No kernel touches what is not its own, and none depends on the order of its programs.

Without a GPU the interpreter's `Sanitizer` sees every lane. On one, poison around all tensors is there, and
compute-sanitizer may watch these tests.
"""

import ast
import functools
import importlib.util
import random
import sys
from pathlib import Path

import kernel_cases as cases
import pytest
import torch
from test_paged_attention_kernels import new_memory_is_nan
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import minivllm
from minivllm.gpu.pages.slots import PagedSlots
from tests.tools.device import DEVICE
from tests.tools.nights import without_gpu_at_night
from tests.tools.sanitizer import Raced, Sanitizer, Strayed
from tests.worlds.engines import run, tiny_world
from tests.worlds.gpu import MIXED, add_requests, assert_tokens_are_right, graphed_engine

__all__ = ["new_memory_is_nan"]

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
PACKAGE = Path(minivllm.__file__).parent
in_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter tells which lane touched what")

PLACES = [((8, 21), (5, 21)), ((33, 8), (33, 3)), ((4, 7), (4, 7)), ((3, 5), (0, 0)), ((60, 50), (60, 50))]
# Together they launch every kernel.
FAMILIES = {
    "slots": functools.partial(cases.slots, tokens=17, slots=3, rank=7, width=37, heights=[19, 40]),
    "write a slot": functools.partial(cases.write_slot, shapes=PLACES[2::-1], slot=2),
    "pages": functools.partial(cases.pages, tokens=7, rank=9, page_ranks=4, width=70, heights=[33, 20]),
    "gated": functools.partial(cases.gated, tokens=17, rank=7, page_ranks=4, width=40, inner=35),
    "normed": functools.partial(cases.normed, tokens=17, rank=7, page_ranks=4, width=40, size=35),
    "turned": functools.partial(cases.turned, tokens=17, rank=7, page_ranks=4, heads=(5, 2, 20), many=True),
    "decodes": functools.partial(cases.decodes, seq_lens=[64, 9, 300], max_seq_len=512, heads=(6, 2, 20)),
    "decodes of many splits": functools.partial(
        cases.decodes, seq_lens=[64, 9, 300], max_seq_len=4096, heads=(6, 2, 20)
    ),
    "prompts": functools.partial(cases.prompts, query_lens=[5, 1, 3], seq_lens=[16, 9, 3], heads=(6, 2, 20)),
    "norms": functools.partial(cases.norms, rows=3, size=100),
    "silu": functools.partial(cases.silu, rows=3, width=1100),
    "rotations": functools.partial(
        cases.rotations, slot_mapping=[5, 11, 2, 0, 0], num_heads=4, num_kv_heads=3, size=20
    ),
    "linear": functools.partial(cases.linear, m=17, n=70, k=45, bias=True),
    "tokens": functools.partial(cases.tokens_known_late, count=257),
    "likeliest": functools.partial(cases.likeliest_tokens, rows=3, width=2100),
    "sums": functools.partial(cases.sum_of_ranks, rank=1, size=3, n=1028),
    "gathers": functools.partial(cases.gather_of_ranks, rank=1, size=3, rows=33, width=36),
    "sums and norms": functools.partial(cases.norm_of_ranks, rank=1, size=3, rows=5, width=1004),
    "sums and normed": functools.partial(
        cases.normed, tokens=7, rank=7, page_ranks=4, width=40, size=35, ranks=3
    ),
}

# These take the ways that those do not.
OTHER_WAYS = {
    "pages of many ranks": functools.partial(
        cases.pages, tokens=3, rank=20, page_ranks=8, width=40, heights=[33], block_r=16
    ),
    "gated of many ranks": functools.partial(
        cases.gated, tokens=3, rank=20, page_ranks=8, width=40, inner=35, block_r=16
    ),
    "turned of many ranks": functools.partial(
        cases.turned, tokens=5, rank=20, page_ranks=8, heads=(3, 1, 20), block_r=16
    ),
    "turned by one adapter for all": functools.partial(
        cases.turned, tokens=17, rank=7, page_ranks=4, heads=(3, 2, 12), parts=1
    ),
    "normed of many ranks": functools.partial(
        cases.normed, tokens=3, rank=20, page_ranks=8, width=40, size=33, block_r=4
    ),
    "sums and normed of many ranks": functools.partial(
        cases.normed, tokens=3, rank=20, page_ranks=8, width=40, size=33, block_r=4, ranks=2
    ),
    "decodes of whole splits": functools.partial(
        cases.decodes, seq_lens=[9, 512], max_seq_len=512, heads=(6, 2, 20), padding=0
    ),
    "decodes that are not split": functools.partial(
        cases.decodes, seq_lens=[16, 9], max_seq_len=16, heads=(6, 2, 20)
    ),
}
OVERLAPPING = {
    "slots": cases.lora_expand_op,
    "pages": cases.paged_expand_op,
    "gated": cases.adapted_silu_op,
    "turned": cases.adapted_rotary_op,
    "normed": cases.adapted_norm_op,
}
SMALLEST = {
    **FAMILIES,
    **OTHER_WAYS,
    **{
        f"{family}, overlapping": functools.partial(cases.overlapping, case=FAMILIES[family], module=module)
        for family, module in OVERLAPPING.items()
    },
}


# Each kernel that has no such test by day elsewhere, in what takes least time in the interpreter.
BY_DAY = [
    *("slots", "write a slot", "pages, overlapping", "normed", "prompts", "norms", "silu", "rotations"),
    *("decodes of whole splits", "decodes that are not split", "linear", "tokens", "likeliest", "gathers"),
    "sums and normed of many ranks",
]

TOKENS, RANKS, KINDS = (1, 2, 15, 16, 17, 33), (1, 7, 8, 12, 64), ("mixed", "last", "base")
WIDTHS, BLOCK_SIZES, MANY = (37, 64, 130), (4, 16), (False, True)
HEIGHTS = ([48], [19, 128, 1], [130, 70])
OF_PAGES = {"tokens": TOKENS, "rank": RANKS, "page_ranks": (4, 8, 16), "width": WIDTHS, "kind": KINDS}
QUERIES = [([1], [1]), ([33, 1, 16], [64, 16, 16]), ([1, 70, 15], [130, 100, 48])]
CONTEXTS = ([1], [16, 15, 17, 32, 33], [64, 128, 1], [300, 1, 700], [257, 256, 128, 129])
OF_CACHE = {"heads": ((6, 2, 64), (3, 1, 80), (2, 2, 16), (20, 1, 32)), "block_size": BLOCK_SIZES}
# A case, and of what its arguments are drawn: sizes at the edges of tiles, and what takes another way.
AT_EDGES = [
    (cases.slots, {"tokens": TOKENS, "slots": (1, 6), "rank": RANKS, "width": WIDTHS, "heights": HEIGHTS,
                   "kind": KINDS, "splits": (1, 2, 3)}),
    (cases.pages, {**OF_PAGES, "heights": HEIGHTS, "experts": (1, 2), "many": MANY}),
    (cases.gated, {**OF_PAGES, "inner": WIDTHS, "many": MANY}),
    (cases.turned, {**OF_PAGES, "heads": ((6, 2, 16), (5, 1, 34), (9, 3, 80)), "many": MANY, "parts": (1, 3)}),
    (cases.normed, {**OF_PAGES, "size": WIDTHS, "block_r": (4, 64)}),
    (cases.write_slot, {"shapes": (PLACES,), "slot": (0, 1, 2)}),
    (cases.decodes, {**OF_CACHE, "seq_lens": CONTEXTS, "max_seq_len": (None, 4096, 8192)}),
    *((functools.partial(cases.prompts, query_lens=new, seq_lens=all_of_them), OF_CACHE)
      for new, all_of_them in QUERIES),
    (cases.norms, {"rows": TOKENS, "size": (1, 64, 576, 1025)}),
    (cases.silu, {"rows": TOKENS, "width": (1, 64, 576, 1025)}),
    (cases.linear, {"m": TOKENS, "n": (1, 64, 130), "k": (1, 64, 576, 1025), "bias": MANY}),
    (cases.rotations, {"slot_mapping": ([11], [5, 11, 2, 8, 3], [0] * 3), "num_heads": (2, 4, 9),
                       "num_kv_heads": (1, 2, 3), "size": (2, 64, 80)}),
    (cases.likeliest_tokens, {"rows": TOKENS, "width": (1, 1024, 1025, 5000)}),
    (cases.tokens_known_late, {"count": (1, 255, 256, 257, 700)}),
]  # fmt: skip


def in_any_order(case, seeds=(None, 1, 2)):
    """What a case writes, the same in every order of its programs."""
    first, *others = [case(Sanitizer(seed=seed)) for seed in seeds]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "family", without_gpu_at_night(BY_DAY, *(name for name in SMALLEST if name not in BY_DAY))
)
def test_a_kernel_touches_its_own_tensors_alone_and_gives_the_same_bits_in_any_order(family):
    in_any_order(SMALLEST[family])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("case", "drawn_of"), AT_EDGES)
def test_at_every_edge_too(case, drawn_of, seed):
    rng = random.Random(seed)
    drawn = {name: rng.choice(values) for name, values in drawn_of.items()}

    in_any_order(functools.partial(case, **drawn), seeds=(None, 1))


@pytest.mark.nightly_without_gpu
@in_interpreter
def test_every_kernel_of_the_package_is_under_guard():
    launched = set()
    for case in FAMILIES.values():
        sanitizer = Sanitizer()
        case(sanitizer)
        launched |= set(sanitizer.kernels)

    assert launched == {kernel for path in PACKAGE.rglob("*.py") for kernel in kernels_of(path)}


def kernels_of(path):
    """Those that a module launches: what kernels call among themselves is no launch."""
    text = path.read_text()
    if "triton.jit" not in text:
        return []
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    jitted = [node.name for node in found if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)]
    return [name for name in jitted if f"{name}[" in text]


@in_interpreter
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "adapters"),
    [
        ("triton", {"_rotary_and_cache_kernel", "_lora_expand_kernel"}),
        ("paged", {"_adapted_rotary_kernel", "_adapted_silu_kernel"}),
    ],
)
def test_an_engines_kernels_touch_what_is_theirs_alone(tmp_path_factory, backend, adapters):
    world = tiny_world(tmp_path_factory)
    engine = graphed_engine(world, "decodes", "mixed", punica_backend=backend, max_num_batched_tokens=20)
    caches = [module.kv_cache for module in engine.runner.model.modules() if hasattr(module, "kv_cache")]
    # Padding is written to the null block.
    sanitizer = Sanitizer(written_by_address(engine), [cache[:1] for cache in caches], seed=3)

    with sanitizer.watching():
        add_requests(engine, world, MIXED)
        outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert {"_paged_attention_kernel", *adapters} <= set(sanitizer.kernels)


def written_by_address(engine):
    """Where adapters are written: slots and pages."""
    manager = engine.runner.lora_manager.manager
    slots = [module.slots for module in manager.modules.values()]
    buffers = [buffer for one in slots if not isinstance(one, PagedSlots) for buffer in (*one.a, *one.b)]
    tables = [table for one in slots for tables in one.beside.values() for table in tables]
    return [*buffers, *tables, *(manager.pool.regions if hasattr(manager, "pool") else [])]


# ---- what the guard sees ------------------------------------------------------------------------------------

SLOTS, PAGES = "gpu/sgmv", "gpu/kernels"
LAYERS = "gpu/kernels"
WAIT = "tl.extra.cuda.gdc_wait()"
# file, what stands there, what is put there, the case, what is said. Numbers that are merely
# wrong are here among peers alone: each case holds its own against float64.
FAULTS = {
    "shrink reads past K": (
        f"{SLOTS}/lora_shrink_op.py", "mask=is_row[:, None] & is_column[None, :]", "mask=is_row[:, None]",
        "slots", (Strayed, "_lora_shrink_kernel.* read outside: element .* of x_ptr")),
    "shrink reads dead ranks": (
        f"{SLOTS}/lora_shrink_op.py", "mask=(rank < live)[None, :] &", "mask=(rank < R)[None, :] &",
        "slots", (AssertionError, "read outside a buffer, past a live rank")),
    "shrink writes h past R": (
        f"{SLOTS}/lora_shrink_op.py", "& (rank < R)[None, :])", "& (rank < R + 1)[None, :])",
        "slots", (AssertionError, "_lora_shrink_kernel")),
    "expand's blocks overlap": (
        f"{SLOTS}/lora_expand_op.py", "offset += WIDTHS[i]", "offset += WIDTHS[i] - 1",
        "slots", (Raced, "_lora_expand_kernel: .* of y_ptr, and nothing orders the two")),
    "a slot is written past its rows": (
        f"{SLOTS}/write_slot_op.py", "values, mask=row < rows)", "values, mask=row <= rows)",
        "write a slot", (Strayed, "_write_slot_kernel.* write outside")),
    "a piece is read past its end": (
        f"{SLOTS}/write_slot_op.py", "mask=live, other=0.0)", "mask=row < rows, other=0.0)",
        "write a slot", (Strayed, "_write_slot_kernel.* read outside: .* of weights")),
    "pages are looked up past the largest rank": (
        f"{PAGES}/paged_shrink_op.py", "rank, rank < R, expert", "rank, rank >= 0, expert",
        "pages", (Strayed, "_paged_shrink_kernel.* of (table_ptr|pool_ptr)")),
    "planes are added up before all are there": (
        f"{PAGES}/paged_shrink_op.py", "== SPLITS - 1", "== 0",
        "pages", (Raced, "_paged_shrink_kernel: .*nothing orders the two")),
    "a count orders nothing": (
        f"{PAGES}/paged_shrink_op.py", 'sem="acq_rel"', 'sem="relaxed"',
        "pages", (Raced, "_paged_shrink_kernel: .*nothing orders the two")),
    "a count before the plane": (
        f"{PAGES}/paged_shrink_op.py", "tl.debug_barrier()", "pass",
        "pages", (Raced, "_paged_shrink_kernel.* releases what its other threads have written, and no barrier")),
    "pages: expand writes past a slice": (
        f"{PAGES}/paged_expand_op.py", "& is_column[None, :] & (live > 0)", "& (live > 0)",
        "pages", (AssertionError, "_paged_expand_kernel")),
    "pages: the last of the planes is not cleared": (
        f"{PAGES}/paged_shrink_op.py", "tl.store(count, 0)", "tl.store(count, 1)",
        "pages", (AssertionError, "the next shrink counts on from these")),
    "an adapter is written past its pages": (
        f"{PAGES}/write_pages_op.py", "(cell < rows * columns) & ", "",
        "pages", (Strayed, "_write_pages_kernel")),
    "the activation takes adapters' rows for base rows": (
        f"{PAGES}/adapted_silu_op.py", "rows_ptr + first +", "rows_ptr + first - tl.where(tile < tile_count, 0, 1) +",
        "gated", (Raced, "_adapted_silu_kernel: .* of out_ptr, and nothing orders the two")),
    "expand reads y of a kernel that has not ended": (
        f"{PAGES}/paged_expand_op.py",
        f"{WAIT}\n                y = tl.load(", "pass\n                y = tl.load(",
        "pages, overlapping", (Raced, "_paged_expand_kernel.* and has not waited")),
    "an expand of no tile does not wait": (
        f"{SLOTS}/lora_expand_op.py", f"{WAIT}\n        return", "pass\n        return",
        "slots, overlapping", (Raced, "_lora_expand_kernel.* ends and has not waited")),
    "an activation of no rows does not wait": (
        f"{PAGES}/adapted_silu_op.py",
        f"{WAIT}\n        return\n    has_slot", "pass\n        return\n    has_slot",
        "gated, overlapping", (Raced, "_adapted_silu_kernel.* ends and has not waited")),
    "rotary with adapters takes a head of the next part": (
        f"{PAGES}/adapted_rotary_op.py", "& (head < head_count)", "& (head <= head_count)",
        "turned", (Strayed, "_adapted_rotary_kernel.* of heads_ptr")),
    "base rows are the rows of adapters": (
        f"{PAGES}/adapted_rotary_op.py", "rows_ptr + first_place",
        "rows_ptr + first_place - tl.where(tile < tile_count, 0, 1)",
        "turned", (Raced, "_adapted_rotary_kernel: .* of heads_ptr")),
    "rotary reads h of a kernel that has not ended": (
        f"{PAGES}/adapted_rotary_op.py", f"{WAIT}\n    if R <= BLOCK_R", "pass\n    if R <= BLOCK_R",
        "turned, overlapping", (Raced, "_adapted_rotary_kernel.* and has not waited")),
    "a rotation of no rows does not wait": (
        f"{PAGES}/adapted_rotary_op.py", f"{WAIT}\n        return", "pass\n        return",
        "turned, overlapping", (Raced, "_adapted_rotary_kernel.* ends and has not waited")),
    "a norm has the row after its own": (
        f"{PAGES}/adapted_norm_op.py", "row = tl.program_id(0)", "row = (tl.program_id(0) + 1)",
        "normed", (Strayed, "_adapted_norm_kernel")),
    "a norm adds ranks past the live one": (
        f"{PAGES}/adapted_norm_op.py", "mask=all_ranks < live,", "mask=all_ranks < R,",
        "normed", (AssertionError, "NaN")),
    "a norm takes B's of ranks past the live one": (
        f"{PAGES}/adapted_norm_op.py", "inside, rank, live)", "inside, rank, R)",
        "normed", (Strayed, "_adapted_norm_kernel.* of pool_ptr")),
    "h is multiplied past the live rank": (
        f"{PAGES}/paged_pieces.py", "& (rank < live)[None, :]", "& (rank < R)[None, :]",
        "gated", (AssertionError, "NaN")),
    "B is read past the live rank": (
        f"{PAGES}/paged_pieces.py", "is_live = rank < live", "is_live = rank >= 0",
        "turned", (Strayed, "_adapted_rotary_kernel.* of pool_ptr")),
    "a norm reads h of a kernel that has not ended": (
        f"{PAGES}/adapted_norm_op.py", f"{WAIT}\n    h =", "pass\n    h =",
        "normed, overlapping", (Raced, "_adapted_norm_kernel.* and has not waited")),
    "a table is read past its context": (
        f"{LAYERS}/attention.py", "position // BLOCK_SIZE, mask=in_context, other=0)", "position // BLOCK_SIZE)",
        "decodes", (Strayed, "_paged_attention_kernel.* of (block_tables_ptr|cache_ptr)")),
    "all splits write one place": (
        f"{LAYERS}/attention.py", "(first + split) * D + dim[None, :], output", "first * D + dim[None, :], output",
        "decodes", (Raced, "_paged_attention_kernel: .* of partial_ptr, and nothing orders the two")),
    "splits are weighed that are not there": (
        f"{LAYERS}/attention.py", "is_member & (split < live)", "is_member & (split < SPLITS)",
        "decodes of many splits", (AssertionError, "NaN")),
    "splits are put together before all are there": (
        f"{LAYERS}/attention.py", "== live - 1", "== 0",
        "decodes", (Raced, "_paged_attention_kernel: .*nothing orders the two")),
    "a count of splits orders nothing": (
        f"{LAYERS}/attention.py", 'sem="acq_rel"', 'sem="relaxed"',
        "decodes", (Raced, "_paged_attention_kernel: .*nothing orders the two")),
    "a count before the partial": (
        f"{LAYERS}/attention.py", "tl.debug_barrier()", "pass",
        "decodes", (Raced, "_paged_attention_kernel.* releases what its other threads have written, and no barrier")),
    "a count of splits is not cleared": (
        f"{LAYERS}/attention.py", "tl.store(counts_ptr + count, 0)", "tl.store(counts_ptr + count, 1)",
        "decodes", (AssertionError, "the next step counts on from these")),
    "the likeliest is looked for past the row": (
        f"{LAYERS}/likeliest.py", "mask=inside, other=float", "mask=column >= 0, other=float",
        "likeliest", (Strayed, "_keep_kernel.* read outside: .* of logits_ptr")),
    "prompts: a tile has a row too many": (
        f"{LAYERS}/attention.py", "(token < length)[:, None]", "(token <= length)[:, None]",
        "prompts", (AssertionError, "_paged_attention_kernel")),
    "a norm reads past its row": (
        f"{LAYERS}/norm.py", "x = tl.load(x_ptr + row * x_row + head * x_head + column, mask=inside, other=0.0)",
        "x = tl.load(x_ptr + row * x_row + head * x_head + column)",
        "norms", (Strayed, "_rms_norm_kernel.* of x_ptr")),
    "a norm in place is off by one": (
        f"{LAYERS}/norm.py", "tl.store(residual_ptrs, kept", "tl.store(residual_ptrs + 1, kept",
        "norms", (Strayed, "_fused_add_rms_norm_kernel.* write outside: element .* of residual_ptr")),
    "silu writes past its row": (
        f"{LAYERS}/activation.py", "* up, mask=inside)", "* up, mask=column <= width)",
        "silu", (AssertionError, "_silu_and_mul_kernel")),
    "rotary takes a head too many": (
        f"{LAYERS}/rotary.py", "(head < NUM_HEADS + 2 * NUM_KV_HEADS)", "(head <= NUM_HEADS + 2 * NUM_KV_HEADS)",
        "rotations", (Strayed, "_rotary_and_cache_kernel.* of heads_ptr")),
    "rotary: programs share a head": (
        f"{LAYERS}/rotary.py", "tl.program_id(1) * HEADS +", "tl.program_id(1) * (HEADS - 1) +",
        "rotations", (Raced, "_rotary_and_cache_kernel")),
    "a linear reads past K": (
        f"{LAYERS}/invariant_linear.py", "mask=(columns < N)[None, :] & inside[:, None]",
        "mask=(columns < N)[None, :] & (inner >= 0)[:, None]",
        "linear", (Strayed, "_invariant_linear_kernel.* of w_ptr")),
    "an id reads a token it does not stand for": (
        f"{LAYERS}/stand_ins.py", "mask=stands_in, other=0)", "mask=inside, other=0)",
        "tokens", (Strayed, "_fill_in_kernel.* of tokens_ptr")),
    "a gather writes past its rows": (
        "parallel/peers/gather_op.py", "* WIDTH + column, part, mask=inside)", "* WIDTH + column, part)",
        "gathers", (Strayed, "_peer_gather_kernel.* write outside: element .* of y_ptr")),
    "peers: a norm's row has the turn of the one before": (
        "parallel/peers/norm_op.py", "turns_ptr + row)", "turns_ptr + tl.maximum(row - 1, 0))",
        "sums and norms", (AssertionError, "")),
    "peers: a rank sends more than a row": (
        "parallel/peers/norm_op.py", "send(x, column, inside,", "send(x, column, column >= 0,",
        "sums and norms", (AssertionError, "")),
    "peers: what was received stays there": (
        "parallel/peers/exchange.py", "tl.zeros(bits.shape, bits.dtype), mask=inside)", "bits, mask=inside)",
        "sums", (AssertionError, "")),
    "peers: h that was received stays there": (
        "parallel/peers/exchange.py", "tl.zeros(more.shape, more.dtype), mask=", "more, mask=",
        "sums and normed", (AssertionError, "")),
    "peers: what was received is cleared before all threads have read it": (
        "parallel/peers/exchange.py", "    tl.debug_barrier()", "    tl.store(ptrs, bits, mask=inside)",
        "sums", (AssertionError, "")),
    "peers: a 0 is sent as it is": (
        "parallel/peers/exchange.py", "tl.where(bits == 0, minus_zero, bits)", "bits",
        "sums", (AssertionError, "")),
    "peers: one half is used in every turn": (
        "parallel/peers/exchange.py", "2 + (turn & 1)", "2 + (turn & 2)",
        "sums", (AssertionError, "")),
    "peers: h is sent where the row's numbers are": (
        "parallel/peers/norm_op.py", "rank_of_h + BYTES_OF_X // 4", "rank_of_h",
        "sums and normed", (AssertionError, "")),
    "peers: h is sent past the live rank": (
        "parallel/peers/norm_op.py", "send(h, h_place, is_live,", "send(h, h_place, rank_of_h < R,",
        "sums and normed", (AssertionError, "")),
    "peers: what adapters add is added for this rank's h alone": (
        "parallel/peers/norm_op.py", "row_times_b(all_h, rank_of_b", "row_times_b(h, rank_of_b",
        "sums and normed", (AssertionError, "")),
    "peers: other ranks of h in the second block": (
        f"{PAGES}/paged_pieces.py", "rank = first + tl.arange", "rank = tl.arange",
        "sums and normed of many ranks", (AssertionError, "")),
}  # fmt: skip


@pytest.mark.nightly
@in_interpreter
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_seen(fault, monkeypatch, tmp_path):
    file, right, wrong, family, (error, said) = FAULTS[fault]
    text = (PACKAGE / file).read_text()
    assert right in text, f"{file} changed: the fault's line is another one"
    faulty = load(tmp_path / Path(file).name, text.replace(right, wrong))
    module = importlib.import_module("minivllm." + file.removesuffix(".py").replace("/", "."))
    for name, user in users_of(module):
        monkeypatch.setattr(user, name, getattr(faulty, name))

    with pytest.raises(error, match=said):
        in_any_order(SMALLEST[family])


def users_of(module):
    """Each jitted function of a module, and every module of the package that has it: what kernels call, too."""
    jitted = {name: f for name, f in vars(module).items() if isinstance(f, JITFunction | InterpretedFunction)}
    own = {name: f for name, f in jitted.items() if f.fn.__module__ == module.__name__}
    users = [user for name, user in sys.modules.items() if name.startswith("minivllm.")]
    return [(name, user) for name, f in own.items() for user in users if vars(user).get(name) is f]


def load(path, text):
    """A module from a file of its own, where the interpreter finds its kernels' source."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"faulty_{path.stem}", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module
