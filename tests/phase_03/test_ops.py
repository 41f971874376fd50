"""The six ops against float64 sums, one token at a time (labs 3.2, 3.3 and 3.5).

Unused slots hold NaN, and so does everything around a buffer.
"""

import pytest
import torch
from per_token import (
    assert_columns_written,
    choose,
    expanded,
    has_adapter,
    random_slots,
    random_tensor,
    shrunk,
)
from torch.overrides import TorchFunctionMode

from minivllm.lora.ops.by_run import expand_runs, products, shrink_runs
from minivllm.vllm.torch_ops import (
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)
from tests.oracles.rows import assert_rows_equal, labels_of
from tests.tools.memory import Guarded

SIZES = [1, 2, 3, 7, 16, 33]
CASES = range(15)
OUTPUT = "output, slots that nobody uses being NaN"
NOWHERE = torch.zeros((), dtype=torch.bool)
# Of input, weights, output: how far off the largest value a result may be.
DTYPES = {
    (torch.float32, torch.float32, torch.float32): 1e-5,
    (torch.float64, torch.float64, torch.float64): 1e-13,
    (torch.bfloat16, torch.bfloat16, torch.float32): 1e-5,
    (torch.float16, torch.float16, torch.float32): 1e-5,
    (torch.float32, torch.bfloat16, torch.float32): 1e-5,
    (torch.float32, torch.bfloat16, torch.bfloat16): 2**-8,
    (torch.float32, torch.float16, torch.float16): 2**-10,
    (torch.bfloat16, torch.bfloat16, torch.bfloat16): 2**-7,
    (torch.bfloat16, torch.float32, torch.bfloat16): 2**-8,
}
DTYPE_IDS = ["-".join(str(t).removeprefix("torch.") for t in dtypes) for dtypes in DTYPES]


def shrink_a_run(inputs, lora_a, output, slots):
    shrink_runs(inputs, lora_a, output, [(0, slice(0, len(slots)))])


@pytest.mark.parametrize(
    "shrink",
    [
        pytest.param(bgmv_shrink, marks=pytest.mark.lab("3.2")),
        pytest.param(shrink_a_run, marks=pytest.mark.lab("3.5")),
    ],
)
def test_inputs_are_not_squeezed_into_a_dtype_that_cannot_hold_them(shrink):
    """In float16 100,000 is infinite; the sum is not."""
    inputs, lora_a = torch.tensor([[1e5, -1e5, 3.0]]), torch.tensor([[[1.0, 1.0, 2.0]]], dtype=torch.float16)
    output = torch.zeros(1, 1, dtype=torch.float16)

    shrink(inputs, lora_a, output, torch.tensor([0]))

    assert output.tolist() == [[6.0]]


def segments(slots, generator):
    """What sgmv ops take: pieces of neighbouring rows with one slot, base rows among them, as requests would be.

    Neighbours with the same slot may be two pieces; what follows the last piece is rubbish.
    """
    starts, lengths, piece_slots = [], [], []
    for row, slot in enumerate(slots):
        if row and slot == slots[row - 1] and choose(generator, [True, True, False]):
            lengths[-1] += 1
        else:
            starts.append(row)
            lengths.append(1)
            piece_slots.append(slot)
    rubbish = ([7, 0], [3, 900], [0, 5])
    tensors = (torch.tensor(a + b) for a, b in zip((starts, lengths, piece_slots), rubbish, strict=True))
    return *tensors, len(starts), max(lengths, default=0), len(slots)


def bgmv_meta(slots, generator):
    return (torch.tensor(slots, dtype=torch.long),)


SHRINKS = [
    pytest.param(bgmv_shrink, bgmv_meta, marks=pytest.mark.lab("3.2"), id="bgmv"),
    pytest.param(sgmv_shrink, segments, marks=pytest.mark.lab("3.5"), id="sgmv"),
]
SLICE_EXPANDS = [
    pytest.param(bgmv_expand_slice, bgmv_meta, marks=pytest.mark.lab("3.3"), id="bgmv"),
    pytest.param(sgmv_expand_slice, segments, marks=pytest.mark.lab("3.5"), id="sgmv"),
]
WHOLE_EXPANDS = [
    pytest.param(bgmv_expand, bgmv_meta, marks=pytest.mark.lab("3.3"), id="bgmv"),
    pytest.param(sgmv_expand, segments, marks=pytest.mark.lab("3.5"), id="sgmv"),
]


def slot_weights(generator, slots, rows, columns, used, dtype):
    """(S, out, in), or (S, 1, out, in) as the layers have them; slots that nobody uses are NaN."""
    weights = random_tensor(generator, slots, rows, columns, dtype=dtype)
    for slot in set(range(slots)) - set(used):
        weights[slot] = float("nan")
    return weights, choose(generator, [weights, weights.unsqueeze(1)])


def cases_of(dtypes):
    """Five of the cases; three dtypes that follow each other have all of them."""
    return CASES[list(DTYPES).index(dtypes) % 3 :: 3]


@pytest.mark.parametrize("dtypes", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("op", "meta"), SHRINKS)
def test_shrink_writes_the_sums_of_adapter_rows_and_nothing_else(op, meta, dtypes):
    for seed in cases_of(dtypes):
        generator = torch.Generator().manual_seed(seed)
        tokens, width, rank, slots = (choose(generator, SIZES) for _ in range(4))
        token_slots = random_slots(generator, tokens, slots)
        scaling = choose(generator, [1.0, 0.25, 3.5])
        a, a_given = slot_weights(generator, slots, rank, width, token_slots, dtypes[1])
        x = Guarded(random_tensor(generator, tokens, width, dtype=dtypes[0]))
        y = Guarded(random_tensor(generator, tokens, rank + choose(generator, [0, 4]), dtype=dtypes[2]))

        op(x.view, a_given, y.view, *meta(token_slots, generator), scaling)

        expected = shrunk(x.before, a, token_slots, scaling)
        assert_columns_written(y, 0, expected, token_slots, DTYPES[dtypes], OUTPUT)
        x.assert_written_only_where(NOWHERE)


@pytest.mark.parametrize("dtypes", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("op", "meta"), SLICE_EXPANDS)
def test_expand_writes_one_slice_of_adapter_rows_and_nothing_else(op, meta, dtypes):
    for seed in cases_of(dtypes):
        generator = torch.Generator().manual_seed(seed)
        tokens, rank, size, slots = (choose(generator, SIZES) for _ in range(4))
        token_slots = random_slots(generator, tokens, slots)
        b, b_given = slot_weights(generator, slots, size, rank, token_slots, dtypes[1])
        x = Guarded(random_tensor(generator, tokens, rank + choose(generator, [0, 3]), dtype=dtypes[0]))
        offset, after = choose(generator, [0, 1, 6]), choose(generator, [0, 5])
        y = Guarded(random_tensor(generator, tokens, offset + size + after, dtype=dtypes[2]))
        add_inputs = choose(generator, [True, False])

        op(x.view, b_given, y.view, *meta(token_slots, generator), offset, size, add_inputs)

        kept = y.before.double()[:, offset : offset + size] if add_inputs else 0
        expected = expanded(x.before, b, token_slots) + kept
        assert_columns_written(y, offset, expected, token_slots, DTYPES[dtypes], OUTPUT)
        x.assert_written_only_where(NOWHERE)


@pytest.mark.parametrize(("op", "meta"), WHOLE_EXPANDS)
def test_expand_without_a_slice_fills_the_first_columns(op, meta):
    for seed in CASES:
        generator = torch.Generator().manual_seed(seed)
        tokens, rank, size, slots = (choose(generator, SIZES) for _ in range(4))
        token_slots = random_slots(generator, tokens, slots)
        b, b_given = slot_weights(generator, slots, size, rank, token_slots, torch.float32)
        x = Guarded(random_tensor(generator, tokens, rank))
        # An output narrower than B: model and adapter may pad to different widths.
        width = choose(generator, [size, size + 3, max(1, size - 2)])
        y = Guarded(random_tensor(generator, tokens, width))
        add_inputs = choose(generator, [True, False])

        op(x.view, b_given, y.view, *meta(token_slots, generator), add_inputs)

        filled = min(width, size)
        kept = y.before.double()[:, :filled] if add_inputs else 0
        expected = expanded(x.before, b, token_slots)[:, :filled] + kept
        assert_columns_written(y, 0, expected, token_slots, 1e-5, OUTPUT)


@pytest.mark.parametrize(("op", "meta"), [*SHRINKS, *SLICE_EXPANDS, *WHOLE_EXPANDS])
@pytest.mark.parametrize("token_slots", [[-1], [-1, -1, -1], [0, -1], [-1, 2], [2, -1, -1, 1, -1]])
def test_base_rows_are_untouched(op, meta, token_slots):
    """INCIDENTS 1: -1 as an index would give them the last slot's adapter."""
    generator = torch.Generator().manual_seed(0)
    is_shrink, is_slice = "shrink" in op.__name__, "slice" in op.__name__
    x = random_tensor(generator, len(token_slots), 6)
    weights = random_tensor(generator, 3, 6, 6)
    y = random_tensor(generator, len(token_slots), 6)
    before = y.clone()

    rest = (1.0,) if is_shrink else (0, 6) if is_slice else ()
    op(x, weights, y, *meta(token_slots, generator), *rest)

    base = ~has_adapter(token_slots)
    labels = ["a base row"] * int(base.sum())
    assert_rows_equal(y[base], before[base], labels=labels, what="base rows before and after")
    same = [torch.equal(row, old) for row, old in zip(y, before, strict=True)]
    assert same == base.tolist(), f"slots {token_slots}: rows that are as they were: {same}"


@pytest.mark.parametrize(("op", "meta"), [*SHRINKS, *SLICE_EXPANDS])
def test_the_order_of_rows_does_not_change_a_row(op, meta):
    """INCIDENTS 17: unsorted, repeated and non-contiguous adapters, against every row on its own."""
    generator = torch.Generator().manual_seed(3)
    token_slots = [2, 0, 2, -1, 1, 1, 0, -1, 2, 0, 0, 1]
    x = random_tensor(generator, len(token_slots), 40)
    weights = random_tensor(generator, 3, 40, 40)
    rest = (1.0,) if "shrink" in op.__name__ else (0, 40, False)

    def run(rows):
        y = torch.zeros(len(rows), 40)
        op(x[rows], weights, y, *meta([token_slots[row] for row in rows], generator), *rest)
        return y

    alone = torch.cat([run([row]) for row in range(len(x))])
    for _ in range(10):
        order = torch.randperm(len(x), generator=generator).tolist()
        labels = [f"{label}, row {row} in order" for row, label in zip(order, labels_of(token_slots))]
        assert_rows_equal(run(order), alone[order], labels=labels, tolerance=1e-6)


@pytest.mark.parametrize(("op", "meta"), SHRINKS)
def test_a_shrink_rounds_once_when_it_writes(op, meta):
    """After scaling: 1.0039 is 1 in bfloat16, and 3 * 1 is not the 3.0156 that is nearest to 3.0117."""
    generator = torch.Generator().manual_seed(6)
    token_slots = [1, 1, 0, -1, 1]
    x = random_tensor(generator, 5, 8, dtype=torch.float64)
    a = random_tensor(generator, 2, 60, 8, dtype=torch.bfloat16)
    y = random_tensor(generator, 5, 60, dtype=torch.bfloat16)
    x[0], a[1, 0] = torch.eye(8)[0] + torch.eye(8)[1] / 256, 1
    adapter_rows = has_adapter(token_slots)
    exact = torch.where(adapter_rows[:, None], shrunk(x, a, token_slots, 3.0), y.double())

    op(x, a, y, *meta(token_slots, generator), 3.0)

    assert exact[0, 0] == 3 + 3 / 256
    assert_rows_equal(y, exact.bfloat16(), labels=labels_of(token_slots), what="sums rounded to bfloat16")


@pytest.mark.parametrize(("op", "meta"), SLICE_EXPANDS)
def test_an_expand_rounds_once_when_it_writes(op, meta):
    """What is there and what is added are summed in the widest dtype; the update is not rounded before."""
    generator = torch.Generator().manual_seed(5)
    token_slots = [1, 1, 0, -1, 1]
    x = random_tensor(generator, 5, 4, dtype=torch.float64)
    b = random_tensor(generator, 2, 60, 4, dtype=torch.bfloat16)
    y = random_tensor(generator, 5, 60, dtype=torch.bfloat16)
    exact = y.double() + expanded(x, b, token_slots)

    op(x, b, y, *meta(token_slots, generator), 0, 60, True)

    assert_rows_equal(y, exact.bfloat16(), labels=labels_of(token_slots), what="sums rounded to bfloat16")


PRODUCTS = {
    "mm",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "addmm",
    "addmm_",
    "addmv",
    "mv",
    "bmm",
    "baddbmm",
    "einsum",
}
PRODUCTS |= {"linear", "tensordot", "inner", "dot"}


class Work(TorchFunctionMode):
    """Counts matrix products, and numbers that were made: in memory that no argument of the operation has."""

    def __init__(self):
        super().__init__()
        self.products, self.made = 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.products += func.__name__ in PRODUCTS
        if isinstance(made, torch.Tensor):
            given = list(tensors_in([*args, *(kwargs or {}).values()]))
            self.made += made.numel() * (memory_of(made) not in map(memory_of, given))
        return made


def tensors_in(arguments):
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(argument)


def memory_of(tensor):
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


@pytest.mark.lab("3.2")
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float32,) * 2]
)
def test_a_shrink_copies_the_matrices_in_use_and_each_once_at_most(dtypes):
    """A copy for each row, or of each slot, is what a prompt on a large model has no memory for."""
    slots = [3, 3, 1, -1, 3, 1, 3, 3, 1, 1, 3, 1]
    x, a = torch.ones(12, 128, dtype=dtypes[0]), torch.ones(9, 1, 32, 128, dtype=dtypes[1])
    y = torch.zeros(12, 32)

    with Work() as work:
        bgmv_shrink(x, a, y, torch.tensor(slots), 2.0)

    assert y[:, 0].tolist() == [256.0 * (slot >= 0) for slot in slots]
    copied = work.made / (32 * 128)
    assert copied < 3, (
        f"{copied:.1f} times as many numbers were made as A of a slot has; 2 slots of 9 are in use"
    )


# What `products` is given: runs, and how many rows have to be copied for them.
SCATTERED = {
    "in the order of adapters": ([(3, slice(0, 30)), (0, slice(31, 33)), (1, slice(34, 40))], 0),
    "an adapter in two places": ([(3, slice(0, 30)), (0, slice(31, 33)), (3, slice(34, 40))], 36),
    "side by side in two runs": ([(2, slice(4, 9)), (2, slice(9, 17)), (0, slice(20, 24))], 0),
    "side by side, the second first": ([(1, slice(20, 40)), (0, slice(4, 6)), (1, slice(10, 20))], 0),
    "row by row in turn": ([(row % 3, slice(row, row + 1)) for row in range(40)], 40),
    "empty runs": ([(4, slice(7, 7)), (1, slice(0, 8)), (0, slice(8, 8)), (1, slice(8, 10))], 0),
    "the first and the last row": ([(2, slice(39, 40)), (2, slice(0, 1))], 2),
    "no run": ([], 0),
}


def rows_in(rows):
    return torch.arange(40)[rows].tolist()


@pytest.mark.lab("3.5")
@pytest.mark.parametrize("case", SCATTERED)
def test_every_adapters_rows_are_multiplied_by_its_matrix_at_once(case):
    runs, _ = SCATTERED[case]
    generator = torch.Generator().manual_seed(6)
    x, weights = random_tensor(generator, 40, 16), random_tensor(generator, 5, 7, 16)
    slot_of = {row: slot for slot, run in runs for row in range(run.start, run.stop)}
    unused = set(range(5)) - set(slot_of.values())
    weights[list(unused)] = float("nan")

    with Work() as work:
        found = [(rows_in(rows), product) for rows, product in products(x, weights, iter(runs), x.dtype)]

    rows = [row for own, _ in found for row in own]
    assert sorted(rows) == sorted(slot_of), "rows that a product has, each once"
    slots = [sorted({slot_of[row] for row in own}) for own, _ in found]
    assert all(len(own) == 1 for own in slots), f"a product has rows of the slots {slots}, one by one"
    used = len(set(slot_of.values()))
    assert len(found) == work.products == used, f"{work.products} products for {used} adapters"
    for own, product in found:
        expected = shrunk(x[own], weights, [slot_of[row] for row in own], 1.0)
        labels = [f"which is row {row} of slot {slot_of[row]}" for row in own]
        assert_rows_equal(product, expected, labels=labels, tolerance=1e-5)


@pytest.mark.lab("3.5")
@pytest.mark.parametrize("case", SCATTERED)
def test_no_row_is_copied_that_lies_beside_the_others_of_its_adapter(case):
    """Rows are 512 wide here, and products 2, so that what is copied stands out."""
    runs, copied = SCATTERED[case]
    x, weights = torch.ones(40, 512), torch.ones(5, 2, 512)

    with Work() as work:
        for _ in products(x, weights, iter(runs), x.dtype):
            pass

    assert work.made // 512 <= copied, f"{work.made // 512} rows of 512 were copied, {copied} need be"


@pytest.mark.lab("3.5")
def test_only_the_matrices_in_use_are_converted_and_each_once():
    runs = [(3, slice(0, 1)), (0, slice(1, 2)), (3, slice(2, 3)), (3, slice(4, 5))]
    x, weights = torch.ones(5, 24), torch.ones(8, 20, 24, dtype=torch.float16)

    with Work() as work:
        for _ in products(x, weights, iter(runs), torch.float32):
            pass

    matrices = work.made / (20 * 24)
    assert matrices < 3, f"{matrices:.1f} matrices of 20 x 24 were made, where 2 of 8 are in use"


@pytest.mark.lab("3.5")
@pytest.mark.parametrize("op", [shrink_runs, expand_runs])
def test_an_adapters_rows_come_from_all_of_its_runs(op):
    generator = torch.Generator().manual_seed(7)
    slots = [1, 0, 1, 1, 2, 0, 1, -1, 2]
    runs = [(slot, slice(row, row + 1)) for row, slot in reversed(list(enumerate(slots))) if slot >= 0]
    x, weights, y = (random_tensor(generator, *shape) for shape in ((9, 6), (3, 6, 6), (9, 6)))
    before = y.clone()

    op(x, weights, y, iter(runs), *([0, 6, False] if op is expand_runs else []))

    expected = torch.where(has_adapter(slots)[:, None], shrunk(x, weights, slots, 1.0), before.double())
    assert_rows_equal(y, expected, labels=labels_of(slots), tolerance=1e-5)


@pytest.mark.lab("3.5")
def test_a_rank_or_a_column_alone_is_a_matrix_too():
    """(S, 1, K) is three slots of rank 1, and no slot has a dimension too many."""
    generator = torch.Generator().manual_seed(5)
    x, a, b = (random_tensor(generator, *shape) for shape in ((3, 5), (3, 1, 5), (3, 1, 5)))
    runs, shrunken, expanded = [(2, slice(0, 2)), (0, slice(2, 3))], torch.zeros(3, 1), torch.zeros(3, 2)

    shrink_runs(x, a, shrunken, runs)
    expand_runs(x, b, expanded, runs, 1, 1)

    slots = [2, 2, 0]
    assert_rows_equal(shrunken, shrunk(x, a, slots, 1.0), labels=labels_of(slots), tolerance=1e-5)
    assert_rows_equal(expanded[:, 1:], shrunk(x, b, slots, 1.0), labels=labels_of(slots), tolerance=1e-5)


@pytest.mark.lab("3.5")
def test_a_segment_may_be_empty():
    generator = torch.Generator().manual_seed(4)
    x, a = random_tensor(generator, 3, 5), random_tensor(generator, 2, 4, 5)
    y = torch.zeros(3, 4)

    starts, lengths, slots = torch.tensor([0, 2, 2]), torch.tensor([2, 0, 1]), torch.tensor([1, 0, 0])
    sgmv_shrink(x, a, y, starts, lengths, slots, 3, 2, 3, 1.0)

    expected = shrunk(x, a, [1, 1, 0], 1.0)
    assert_rows_equal(y, expected, labels=labels_of([1, 1, 0]), tolerance=1e-5)
