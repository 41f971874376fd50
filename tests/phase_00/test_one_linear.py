"""One linear of the file, three rows and two adapters: the table of the chapter, and merged weights."""

import importlib

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.lab("0.1")


@pytest.fixture(scope="module")
def one_file():
    return importlib.import_module("phases.00_one_file.multilora")


def linear_of(one_file, weight, slots, max_rank):
    """A LoRALinear over a base weight (N, K), with all slots empty, and the batch that it looks at."""
    base = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    base.weight = nn.Parameter(weight.clone(), requires_grad=False)
    batch = one_file.Batch()
    return one_file.LoRALinear(base, slots, max_rank, batch), batch


@pytest.fixture
def paper(one_file):
    """The chapter's: W is 2 x 2, sql is in slot 1 with its scaling of 2 in B, json in slot 0; both have rank 1."""
    layer, batch = linear_of(one_file, torch.tensor([[1.0, 0.0], [0.0, 2.0]]), slots=2, max_rank=1)
    layer.write(1, (torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0], [0.0]])))
    layer.write(0, (torch.tensor([[1.0, -1.0]]), torch.tensor([[0.0], [3.0]])))
    return layer, batch


def test_three_rows_with_two_adapters_and_none_are_as_on_paper(paper):
    layer, batch = paper
    batch.runs = {1: slice(1, 2), 0: slice(2, 3)}

    y = layer(torch.tensor([[[3.0, 0.0], [1.0, 1.0], [2.0, 1.0]]]))

    assert y.tolist() == [[[3.0, 0.0], [5.0, 2.0], [2.0, 5.0]]]


def test_rows_of_the_base_model_are_those_of_the_base_model(paper):
    layer, batch = paper
    x = torch.tensor([[[3.0, -1.0], [1.0, 1.0]]])
    batch.runs = {}

    assert layer(x).tolist() == [[[3.0, -2.0], [1.0, 2.0]]]


def test_a_step_leaves_nothing_behind_for_the_next(paper):
    layer, batch = paper
    x = torch.tensor([[[3.0, 0.0], [1.0, 1.0]]])

    batch.runs = {1: slice(0, 2)}
    first = layer(x).tolist()
    batch.runs = {0: slice(0, 2)}
    layer(x)
    batch.runs = {1: slice(0, 2)}
    again = layer(x).tolist()

    assert first == again == [[[9.0, 0.0], [5.0, 2.0]]]
    assert x.tolist() == [[[3.0, 0.0], [1.0, 1.0]]], "x is the caller's: other layers get it, too"


@pytest.mark.parametrize("width", [6, 10])
def test_every_row_has_what_its_own_merged_weight_gives(one_file, width):
    """Against W + B A in float64, a product of its own for each row. Ranks 3, 1 and 4 in slots of 4."""
    random = torch.Generator().manual_seed(width)
    rand = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    weight, x = rand(width, 6), rand(1, 9, 6)
    layer, batch = linear_of(one_file, weight, slots=3, max_rank=4)
    adapters = {slot: (rand(rank, 6), rand(width, rank)) for slot, rank in enumerate([3, 1, 4])}
    for slot, pair in adapters.items():
        layer.write(slot, pair)
    batch.runs = {2: slice(2, 5), 0: slice(5, 6), 1: slice(6, 9)}
    slot_of_row = [None, None, 2, 2, 2, 0, 1, 1, 1]

    y = layer(x)

    assert y.shape == (1, 9, width)
    for row, slot in enumerate(slot_of_row):
        merged, said = weight.double(), f"row {row} is of the base model, and its output is not W x"
        if slot is not None:
            a, b = adapters[slot]
            merged = merged + b.double() @ a.double()
            said = f"row {row} is of the adapter in slot {slot}, and its output is not (W + B A) x"
        torch.testing.assert_close(
            y[0, row].double(), merged @ x[0, row].double(), rtol=1e-5, atol=1e-5, msg=said
        )
