"""Open exercise of phase 03: a mixed batch with few bytes moved."""

from collections.abc import Callable
from random import Random
from types import ModuleType

import torch

from labs.kit.judges import Refused
from labs.kit.judges.counting import BytesMoved

TITLE = "a mixed batch with few bytes moved"
UNIT = "bytes moved, by the least that is possible"
BUDGET = 2.5

TOKENS = 256  # T
SLOTS = 6  # S
RANK = 32  # R
WIDTH = 512  # K and N


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """Bytes that operations read and write, by those of live A and B, of each adapter row of x, and of y twice."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    ranks = [rng.choice([4, 8, 16]) for _ in range(SLOTS)]
    ranks[rng.randrange(SLOTS)] = RANK
    a = torch.randn(SLOTS, RANK, WIDTH, generator=generator)
    b = torch.randn(SLOTS, WIDTH, RANK, generator=generator)
    for slot, rank in enumerate(ranks):
        a[slot, rank:] = 0
        b[slot, :, rank:] = 0
    slots = [*range(SLOTS), *rng.choices(range(-1, SLOTS), k=TOKENS - SLOTS)]
    rng.shuffle(slots)
    x, y = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
    wanted = y.double()
    for row, slot in enumerate(slots):
        if slot >= 0:
            wanted[row] += b[slot].double() @ (a[slot].double() @ x[row].double())
    with BytesMoved() as moved:
        load().add(y, x, a, b, tuple(slots), tuple(ranks))
    wrong = [
        row for row in range(TOKENS) if not torch.allclose(y[row].double(), wanted[row], atol=1e-2, rtol=1e-3)
    ]
    if wrong:
        raise Refused(
            f"y is wrong in {len(wrong)} of {TOKENS} rows, first in row {wrong[0]}, slot {slots[wrong[0]]}"
        )
    rows = sum(slot >= 0 for slot in slots)
    least = 4 * (2 * WIDTH * sum(ranks) + 3 * WIDTH * rows)
    return moved.nbytes / least
