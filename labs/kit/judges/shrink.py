"""Open exercise of phase 04: a shrink kernel with few bytes loaded and stored."""

import os
from collections.abc import Callable
from random import Random
from types import ModuleType

import torch

from labs.kit.judges import Refused

TITLE = "a shrink kernel with few bytes loaded"
UNIT = "bytes loaded and stored, by the least that is possible"
BUDGET = 2.0

TOKENS = 48  # T
SLOTS = 5  # S
RANK = 16  # R
WIDTH = 128  # K


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """Bytes that kernels load and store, by those of live A, of each adapter row of x, and of its row of h."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: a kernel asks for it when it is defined
    from labs.kit.judges.counting import kernel_bytes

    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    ranks = [rng.choice([4, 8, 16]) for _ in range(SLOTS)]
    slots = [*range(SLOTS), *rng.choices(range(-1, SLOTS), k=TOKENS - SLOTS)]
    rng.shuffle(slots)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    a = torch.randn(SLOTS, RANK, WIDTH, generator=generator)
    for slot, rank in enumerate(ranks):
        a[slot, rank:] = 0
    h = torch.zeros(TOKENS, RANK)
    wanted = torch.zeros(TOKENS, RANK, dtype=torch.double)
    for row, slot in enumerate(slots):
        if slot >= 0:
            wanted[row] = a[slot].double() @ x[row].double()
    answer = load()
    grid, tables, constants = answer.plan(tuple(slots), tuple(ranks), WIDTH, RANK)
    _check_tables(tables)
    with kernel_bytes() as moved:
        answer.shrink_kernel[grid](x, a, h, *tables, **constants)
    wrong = [
        row for row in range(TOKENS) if not torch.allclose(h[row].double(), wanted[row], atol=1e-3, rtol=1e-4)
    ]
    if wrong:
        raise Refused(
            f"h is wrong in {len(wrong)} of {TOKENS} rows, first in row {wrong[0]}, slot {slots[wrong[0]]}"
        )
    rows = [ranks[slot] for slot in slots if slot >= 0]
    return sum(moved) / (4 * (WIDTH * (sum(ranks) + len(rows)) + sum(rows)))


def _check_tables(tables: tuple) -> None:
    """Tables of integers: what is floating is computed by the kernel."""
    for place, table in enumerate(tables):
        if not isinstance(table, torch.Tensor) or table.is_floating_point() or table.is_complex():
            raise Refused(f"table {place} of plan() is no tensor of integers")
