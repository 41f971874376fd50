"""The engine's linears behind the layer benchmark's protocol, row by row against float64."""

import pytest
import torch

from benchmarks.impls import engine_linear, gathered, looped, paged, sgmv
from tests.tools.device import DEVICE

SLOTS, RANK, WIDTH = 3, 16, 40
LIVE = [16, 4, 9]
TOKEN_SLOTS = [2, -1, 0, 0, 1, -1, 2, 1, 0]


def problem(slices, dtype=torch.float32):
    """w, a, b with zeros past the live ranks, and x."""
    generator = torch.Generator().manual_seed(sum(slices))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    a = random(SLOTS, len(slices), RANK, WIDTH)
    b = random(SLOTS, sum(slices), RANK)
    for slot, live in enumerate(LIVE):
        a[slot, :, live:] = 0
        b[slot, :, live:] = 0
    return random(sum(slices), WIDTH), a.flatten(1, 2), b, random(len(TOKEN_SLOTS), WIDTH)


def expected(w, a, b, x, slices):
    """Each row alone: W · x, and for each slice B · (A · x) of the row's slot."""
    rows = []
    for row, slot in zip(x.double(), TOKEN_SLOTS):
        y = w.double() @ row
        offset = 0
        for i, width in enumerate(slices if slot >= 0 else []):
            shrunk = a[slot, i * RANK : (i + 1) * RANK].double() @ row
            y[offset : offset + width] += b[slot, offset : offset + width].double() @ shrunk
            offset += width
        rows.append(y)
    return torch.stack(rows)


def assert_equal(y, wanted):
    assert y.shape == wanted.shape
    assert (y.double() - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("slices", [[24], [16, 48], [32, 16, 16], [48, 32, 32]])
@pytest.mark.parametrize("backend", ["loops", "grouped"])
def test_a_linear_of_any_number_of_slices_answers_as_float64_does(backend, slices):
    w, a, b, x = problem(slices)

    run = engine_linear(backend, w, a, b, slices, torch.tensor(TOKEN_SLOTS, dtype=torch.int32), LIVE)

    assert_equal(run(x), expected(w, a, b, x, slices))


@pytest.mark.parametrize("make", [looped, gathered, sgmv, paged])
def test_the_ways_of_a_gpu_answer_as_float64_does(make):
    slices = [32, 16, 16]
    w, a, b, x = problem(slices)
    token_slots = torch.tensor(TOKEN_SLOTS, dtype=torch.int32, device=DEVICE)

    run = make(w.to(DEVICE), a.to(DEVICE), b.to(DEVICE), slices, token_slots, LIVE, "decode")

    assert_equal(run(x.to(DEVICE)).cpu(), expected(w, a, b, x, slices))
