"""What `assert_rows_equal` lets pass, and what it says."""

import pytest
import torch

from tests.oracles.rows import assert_rows_equal

EXPECTED = torch.arange(1.0, 25.0).reshape(3, 8)


def message(got, expected, **options):
    with pytest.raises(AssertionError) as failure:
        assert_rows_equal(got, expected, **options)
    return str(failure.value)


@pytest.mark.parametrize(
    ("got", "expected", "options"),
    [
        (EXPECTED, EXPECTED.double(), {}),
        (EXPECTED + 1e-4, EXPECTED, {"tolerance": 1e-5}),
        (EXPECTED.bfloat16() * 1.003, EXPECTED, {"tolerance": 1e-2}),
        ([1, 2, -1], [1, 2, -1], {}),
        (torch.tensor([[float("nan"), float("inf")]]), torch.tensor([[float("nan"), float("inf")]]), {}),
        (torch.zeros(0, 4), torch.zeros(0, 4), {}),
        (torch.tensor([2**60 + 1]), [2**60 + 1], {}),
    ],
)
def test_equal_rows_pass(got, expected, options):
    assert_rows_equal(got, expected, **options)


@pytest.mark.parametrize(
    ("got", "expected", "options"),
    [
        (EXPECTED + 1e-3, EXPECTED, {"tolerance": 1e-5}),
        (torch.tensor([float("nan")]), [1.0], {"tolerance": 1e9}),
        ([1.0], torch.tensor([float("nan")]), {"tolerance": 1e9}),
        (torch.tensor([float("inf")]), [1.0], {"tolerance": 1e9}),
        (torch.tensor([2**60 + 1]), [2**60], {}),
        ([True], [False], {}),
    ],
)
def test_other_rows_do_not(got, expected, options):
    message(got, expected, **options)


def test_the_message_says_which_row_whose_it_is_and_what_it_should_have_been():
    got = EXPECTED.clone()
    got[1, 6] = -5
    got[2] = 0

    said = message(got, EXPECTED.double(), labels=["a", "request 'b', adapter 2", "c"], what="lora output")

    assert said.split("\n") == [
        "lora output: 2 of 3 rows are wrong (shape (3, 8) float32, expected (3, 8) float64)",
        "the first is row 1, request 'b', adapter 2",
        "  expected [11, 12, 13, 14, 15, 16], columns 2 to 7 of 8",
        "  got      [11, 12, 13, 14, -5, 16]",
        "  column 6 is off by 20",
    ]


def test_another_shape_is_said_at_once():
    assert message(torch.zeros(2, 3), EXPECTED) == "rows: shape (2, 3) float32, expected (3, 8) float32"


def test_rows_may_be_single_numbers():
    assert "the first is row 2\n  expected [0]\n  got      [-1]" in message([1, 2, -1], [1, 2, 0])


def test_a_nan_that_was_not_expected_is_explained():
    got, expected = torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, 2.0]])

    said = message(got, expected, nan="read outside a buffer")

    assert said.split("\n")[-1] == "  nan: read outside a buffer"
    assert "outside" not in message(EXPECTED + 1, EXPECTED, nan="read outside a buffer")
    assert "outside" not in message(
        torch.tensor([[float("nan"), 1]]), [[float("nan"), 2]], nan="read outside"
    )
