"""What LoRA adds to each token, summed in float64 one number at a time; and buffers between NaN guards."""

import torch


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


class Guarded:
    """A tensor between NaN on all sides, not contiguous: whoever reads or writes past its edge is found out."""

    def __init__(self, content):
        rows, columns = content.shape
        self.whole = torch.full((rows + 5, columns + 7), float("nan"), dtype=content.dtype)
        self.tensor = self.whole[2 : 2 + rows, 3 : 3 + columns]
        self.tensor.copy_(content)
        self.before = self.whole.clone()

    def assert_untouched_but(self, written):
        """Every element is bit for bit what it was, but those of the inner tensor where `written` is True."""
        allowed = torch.zeros(self.whole.shape, dtype=torch.bool)
        allowed[2 : 2 + written.shape[0], 3 : 3 + written.shape[1]] = written
        same = (self.whole == self.before) | (self.whole.isnan() & self.before.isnan())
        assert (same | allowed).all(), "an element was written that should not have been"


def assert_close(actual, expected, relative):
    """Within `relative` of the largest expected value, and no NaN."""
    assert actual.shape == expected.shape
    if actual.numel():
        largest = max(expected.abs().max().item(), 1e-3)
        worst = (actual.double() - expected).abs().max().item()
        assert worst <= relative * largest, f"off by {worst}, largest value {largest}"


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
