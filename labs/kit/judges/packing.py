"""Open exercise of phase 02: an adapter written into its slot with next to no memory beside it."""

from collections.abc import Callable
from random import Random
from types import ModuleType

import torch

from labs.kit.judges import Refused
from labs.kit.judges.counting import peak_bytes

TITLE = "an adapter into its slot with next to no new memory"
UNIT = "peak of new memory, by the adapter's bytes"
BUDGET = 0.1

RANK = 32  # R
WIDTH = 1024  # K
OUTPUTS = (1024, 512, 512)  # N of each slice


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """Peak bytes of new memory while the answer is loaded and writes three adapters, by the largest one's bytes."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    adapters = [_adapter(rng, generator) for _ in range(3)]
    slots = [_slots() for _ in adapters]

    def run() -> None:
        answer = load()
        for (a, b, scalings), (a_slot, b_slot) in zip(adapters, slots):
            answer.write(a_slot, b_slot, a, b, scalings)

    expected = [_expected(*adapter) for adapter in adapters]  # before the answer may touch its inputs
    _, peak = peak_bytes(run)
    for written, wanted in zip(slots, expected):
        for what, found, should in zip("AB", written, wanted):
            for place, (one, other) in enumerate(zip(found, should)):
                if not torch.equal(one, other):
                    wrong = int((one != other).any(1).nonzero()[0])
                    raise Refused(f"{what} of slice {place} is wrong in the slot, first in row {wrong}")
    largest = max(sum(t.nbytes for t in a + b if t is not None) for a, b, _ in adapters)
    return peak / largest


def _adapter(rng: Random, generator: torch.Generator) -> tuple[list, list, list[float]]:
    ranks = [rng.choice([8, 12, 16, 32]) for _ in OUTPUTS]
    ranks[0] = RANK  # so that adapters are about as large
    left_alone = rng.choice([None, 1, 2])
    a = [torch.randn(r, WIDTH, generator=generator) for r in ranks]
    b = [torch.randn(n, r, generator=generator) for n, r in zip(OUTPUTS, ranks)]
    if left_alone is not None:
        a[left_alone] = b[left_alone] = None
    return a, b, [rng.uniform(0.3, 3) for _ in OUTPUTS]


def _slots() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """With the last tenant's weights in them."""
    a = [torch.full((RANK, WIDTH), 7.0, dtype=torch.bfloat16) for _ in OUTPUTS]
    return a, [torch.full((n, RANK), float("nan"), dtype=torch.bfloat16) for n in OUTPUTS]


def _expected(a: list, b: list, scalings: list[float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    found_a, found_b = [], []
    for part_a, part_b, scaling, n in zip(a, b, scalings, OUTPUTS):
        whole_a, whole_b = torch.zeros(RANK, WIDTH), torch.zeros(n, RANK)
        if part_a is not None:
            whole_a[: len(part_a)] = part_a
            whole_b[:, : len(part_a)] = part_b * scaling
        found_a.append(whole_a.bfloat16())
        found_b.append(whole_b.bfloat16())
    return found_a, found_b
