"""What LoRA adds to each token, summed in float64 one number at a time; and random batches."""

import torch

from tests.oracles.rows import assert_rows_equal, labels_of


def shrunk(inputs, lora_a, slots, scaling):
    """(T, R): scaling * sum over k of A[slot][r, k] * x[t, k]; zeros for base rows.   lora_a: (S, R, K)"""
    out = torch.zeros(len(slots), lora_a.shape[1], dtype=torch.float64)
    for token, slot in enumerate(slots):
        if slot >= 0:
            for r in range(lora_a.shape[1]):
                out[token, r] = scaling * (lora_a[slot, r].double() * inputs[token].double()).sum()
    return out


def expanded(inputs, lora_b, slots):
    """(T, N): sum over r of B[slot][n, r] * x[t, r]; zeros for base rows.   lora_b: (S, N, R)"""
    out = torch.zeros(len(slots), lora_b.shape[1], dtype=torch.float64)
    for token, slot in enumerate(slots):
        if slot >= 0:
            row = inputs[token, : lora_b.shape[2]].double()
            for r in range(lora_b.shape[2]):
                out[token] += lora_b[slot, :, r].double() * row[r]
    return out


def has_adapter(slots):
    return torch.tensor([slot >= 0 for slot in slots], dtype=torch.bool)


def assert_columns_written(y, first, values, token_slots, tolerance, what="output"):
    """Adapter rows hold `values` from column `first` on; the rest of y, and what lies around it, is as it was.

    y: Guarded    values: (T, n) float64
    """
    written = torch.zeros(y.view.shape, dtype=torch.bool)
    written[has_adapter(token_slots), first : first + values.shape[1]] = True
    expected = y.before.double().clone()
    expected[written] = values[has_adapter(token_slots)].flatten()
    assert_rows_equal(y.view, expected, labels=labels_of(token_slots), tolerance=tolerance, what=what)
    y.assert_written_only_where(written)


def random_tensor(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def choose(generator, options):
    return options[int(torch.randint(len(options), (), generator=generator))]


def random_slots(generator, tokens, slots):
    """(T,) slots with the base among them, in runs and single rows, in no order. Sometimes all base."""
    if choose(generator, range(8)) == 0:
        return [-1] * tokens
    found = []
    while len(found) < tokens:
        found += [choose(generator, range(-1, slots))] * choose(generator, [1, 1, 2, 5])
    return found[:tokens]
