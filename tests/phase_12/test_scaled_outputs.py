"""Scales on the outputs of a batch: row by row what PEFT gives with that row's adapter alone."""

import pytest
import torch
from dora_linears import KINDS, SLOTS, K, Wrapped, adapter, linear

pytestmark = pytest.mark.lab("12.4")


@pytest.fixture(scope="module", autouse=True)
def oracle():
    """Imported before any test's time counts."""
    import peft  # noqa: F401


IDS = [
    3,
    0,
    1,
    1,
    2,
    0,
    3,
]  # a DoRA adapter, base, another DoRA adapter twice, a plain one, base, the first again


def inputs(rows=7, seed=5):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(kind="one", bias=True, backend="grouped", **third):
    """Slots with a DoRA adapter, a plain one, and a DoRA adapter. Returns the layer and the adapters by id."""
    wrapped = Wrapped(linear(kind, bias), kind, backend)
    adapters = {1: adapter(kind, 1), 2: adapter(kind, 2, is_dora=False), 3: adapter(kind, 3, **third)}
    for number, one in adapters.items():
        wrapped.write(number - 1, one)
    wrapped.scaled.has_scales = True
    return wrapped, adapters


def plainly(wrapped, x):
    weight, bias = wrapped.base.weight, wrapped.base.bias
    return x @ weight.T + (0 if bias is None else bias)


def assert_rows_are_those_of_peft(wrapped, adapters, x, ids, found):
    for row, number in enumerate(ids):
        own = x[row : row + 1]
        expected = adapters[number].answer(wrapped.base, own) if number else plainly(wrapped, own)
        what = {0: "base", 2: "a plain adapter"}.get(number, "a DoRA adapter")
        torch.testing.assert_close(
            found[row : row + 1],
            expected,
            rtol=1e-9,
            atol=1e-9,
            msg=lambda said, row=row, what=what: f"row {row}, {what}: {said}",
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_slots_have_a_table_of_zeros_for_each_slice_in_their_own_dtype(kind, dtype):
    wrapped = Wrapped(linear(kind, dtype=dtype), kind)

    tables = wrapped.layer.slots.beside["dora_scale"]

    heights = wrapped.base.output_partition_sizes
    assert [(table.shape, table.dtype) for table in tables] == [
        ((SLOTS, 1, height), dtype) for height in heights
    ]
    assert not any(table.any() for table in tables)


def test_a_slice_that_is_written_in_one_slot_is_written_nowhere_else():
    wrapped = Wrapped(linear("qkv"), "qkv")
    tables = wrapped.layer.slots.beside["dora_scale"]

    tables[1][2] = 3.0

    assert [table.any(dim=2).flatten().tolist() for table in tables] == [
        [False] * SLOTS,
        [False, False, True],
        [False] * SLOTS,
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without"])
def test_each_row_is_that_of_its_own_adapter_and_the_bias_is_not_scaled(kind, bias):
    wrapped, adapters = filled(kind, bias)
    x = inputs()

    found = wrapped.rows(x, IDS)

    assert_rows_are_those_of_peft(wrapped, adapters, x, IDS, found)


@pytest.mark.parametrize("backend", ["loops", "grouped"])
def test_every_backend_has_the_same_rows(backend):
    wrapped, adapters = filled("qkv", backend=backend)
    x = inputs()

    assert_rows_are_those_of_peft(wrapped, adapters, x, IDS, wrapped.rows(x, IDS))


@pytest.mark.parametrize("without", [(0,), (1,), (0, 2)])
def test_slices_that_an_adapter_leaves_alone_are_not_scaled(without):
    wrapped, adapters = filled("qkv", without=without)
    x = inputs()

    assert_rows_are_those_of_peft(wrapped, adapters, x, IDS, wrapped.rows(x, IDS))


def test_base_rows_and_rows_of_plain_adapters_are_bit_for_bit_what_they_would_be():
    wrapped, _ = filled("merged")
    x, ids = inputs(), [0, 2, 0, 2, 2, 0, 1]
    wrapped.scaled.has_scales = False
    before = wrapped.rows(x, ids)
    wrapped.scaled.has_scales = True

    found = wrapped.rows(x, ids)

    assert torch.equal(found[:6], before[:6])
    assert not torch.equal(found[6], before[6])


def test_a_slot_that_no_row_has_cannot_reach_a_row():
    """Base rows have slot -1, which names the last of a table's rows, or the first if it is clamped."""
    wrapped, adapters = filled()
    for table in wrapped.layer.slots.beside["dora_scale"]:
        table[0], table[2] = float("nan"), float("inf")
    x, ids = inputs(4), [0, 2, 2, 0]

    found = wrapped.rows(x, ids)

    assert found.isfinite().all(), f"rows of base and of slot 1: {found[:, 0].tolist()}"
    assert_rows_are_those_of_peft(wrapped, adapters, x, ids, found)


def test_a_step_after_the_slots_changed_hands_has_the_new_scales():
    wrapped, adapters = filled()
    x = inputs()
    wrapped.rows(x, IDS)
    wrapped.write(0, adapters[2])
    wrapped.write(2, adapters[1])

    found = wrapped.rows(x, IDS)

    assert_rows_are_those_of_peft(wrapped, {1: adapters[2], 2: adapters[2], 3: adapters[1]}, x, IDS, found)


@pytest.mark.parametrize("without", [(0,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("is_dora", [True, False], ids=["a DoRA adapter", "a plain one"])
def test_of_slices_that_it_leaves_alone_an_adapter_keeps_no_scales_of_the_last_one_in_its_slot(
    is_dora, without
):
    """Incident 30."""
    wrapped, adapters = filled("qkv")
    x = inputs()
    adapters[1] = adapter("qkv", 4, is_dora=is_dora, without=without)
    wrapped.write(0, adapters[1])

    assert_rows_are_those_of_peft(wrapped, adapters, x, IDS, wrapped.rows(x, IDS))


def test_the_output_is_changed_in_place_and_given_back():
    """The hook's caller, and a captured step, have the tensor that the layer wrote."""
    wrapped, adapters = filled()
    x = inputs()
    wrapped.begin(IDS)
    y = wrapped.layer.arithmetic.forward(x)[0]
    output = (y, None)

    given = wrapped.scaled.scale(wrapped.layer, (x,), output)

    assert given[0] is y and given[1] is None
    assert_rows_are_those_of_peft(wrapped, adapters, x, IDS, y)


@pytest.mark.parametrize(
    ("ids", "has_scales"), [([0, 0, 0], True), ([1, 2, 0], False)], ids=["base alone", "no scales"]
)
def test_a_step_that_needs_none_computes_nothing(ids, has_scales, monkeypatch):
    """Nobody reads the tables, which may hold what they like, or asks who has which row."""
    wrapped, _ = filled("qkv")
    x = inputs(3)
    wrapped.begin(ids)
    y = wrapped.layer.arithmetic.forward(x)[0]
    before = y.clone()
    for table in wrapped.layer.slots.beside["dora_scale"]:
        table.fill_(float("nan"))
    wrapped.scaled.has_scales = has_scales
    asked = []
    kind = type(wrapped.layer.backend)
    monkeypatch.setattr(
        kind, "token_slots", lambda self, tokens: asked.append(tokens) or torch.zeros(tokens).long()
    )

    given = wrapped.scaled.scale(wrapped.layer, (x,), (y, None))

    assert asked == [], "the slots of rows were asked for"
    assert given[0] is y
    assert torch.equal(y, before)


class OnAGPU(torch.Tensor):
    """Says that it is, and is not."""

    is_cuda = True


def test_on_a_gpu_a_step_is_scaled_whether_or_not_any_adapter_has_scales():
    """It may be captured before one comes, and is replayed after."""
    wrapped, adapters = filled()
    x = inputs()
    wrapped.begin(IDS)
    y = wrapped.layer.arithmetic.forward(x)[0].as_subclass(OnAGPU)
    wrapped.scaled.has_scales = False

    wrapped.scaled.scale(wrapped.layer, (x,), (y, None))

    assert_rows_are_those_of_peft(wrapped, adapters, x, IDS, y.as_subclass(torch.Tensor))


def test_a_step_longer_than_the_batch_of_the_last_one_counts_its_own_rows():
    wrapped, adapters = filled()
    wrapped.rows(inputs(2), [1, 3])
    ids = [2, 3, 0, 1, 0, 1, 1, 3, 2]
    x = inputs(len(ids), seed=9)

    assert_rows_are_those_of_peft(wrapped, adapters, x, ids, wrapped.rows(x, ids))
