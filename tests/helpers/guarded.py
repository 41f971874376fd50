"""Buffers with NaN all round, batches, and what the kernels must give, in float64."""

import torch
from gpu import DEVICE
from nan_guard import Guarded
from rows import assert_rows_equal
from slot_labels import labels_of

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Of the update alone. Products of half-precision numbers are summed in float32, h and y are rounded once each.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

OUTSIDE = "something was read outside a buffer, past a live rank, or where nobody has written"


def guard(values, row_gap=0):
    """The values on the device, in memory where everything around them is NaN.

    row_gap: NaN elements between rows, so that rows are further apart than they are long
    """
    return Guarded(values.flatten(0, -2), row_gap, DEVICE)


def guarded(values, row_gap=0):
    """The same, of the values' shape, for tensors that are only read."""
    return guard(values, row_gap).view.unflatten(0, values.shape[:-1])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_slots(tokens, slots, base_share=0.3, seed=0):
    """(T,) slot of each row in no order, some of them -1."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, slots, (tokens,), generator=generator)
    return torch.where(torch.rand(tokens, generator=generator) < base_share, -1, picks)


def live_part(weights, ranks, dim):
    """A copy in which everything past each slot's rank is NaN: nobody may read it. `dim`: that of the rank."""
    weights = weights.clone()
    for slot, rank in enumerate(ranks):
        weights[slot].narrow(dim, rank, weights[slot].shape[dim] - rank).fill_(float("nan"))
    return weights


def exact_shrink(x, lora_a, token_slots, ranks, scaling=1.0):
    """(n, T, R) float64, zero for base rows and past each rank.   lora_a: n x (S, R, K)   ranks: n x S"""
    h = torch.zeros(len(lora_a), len(x), lora_a[0].shape[1], dtype=torch.float64)
    for i, a in enumerate(lora_a):
        for row, slot in enumerate(token_slots.tolist()):
            if slot >= 0 and (rank := ranks[i][slot]):
                h[i, row, :rank] = scaling * (a[slot, :rank].double() @ x[row].double())
    return h


def exact_expand(h, lora_b, y, token_slots, ranks):
    """(T, N) float64: y plus every row's own.   h: (n, T, R)   lora_b: n x (S, N_i, R)"""
    result, offset = y.double(), 0
    for i, b in enumerate(lora_b):
        columns = slice(offset, offset := offset + b.shape[1])
        for row, slot in enumerate(token_slots.tolist()):
            if slot >= 0 and (rank := ranks[i][slot]):
                result[row, columns] += b[slot, :, :rank].double() @ h[i, row, :rank].double()
    return result


def assert_rows_close(found, expected, token_slots, tolerance, what="y"):
    """found, expected: (T, ...)    tolerance: as a share of the largest value expected"""
    __tracebackhide__ = True
    assert_rows_equal(
        found, expected, labels=labels_of(token_slots), tolerance=tolerance, what=what, nan=OUTSIDE
    )


def by_row(h):
    """(n, T, R) -> (T, n, R): what each row has, for `assert_rows_close`."""
    return h.transpose(0, 1)
