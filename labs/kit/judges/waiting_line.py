"""Open exercise of phase 07: whom a step admits, with a host that does little however many wait."""

from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any

from labs.kit.judges import Refused
from labs.kit.judges.counting import bytecodes_of

TITLE = "a waiting line whose steps cost what they admit, whoever waits"
UNIT = "bytecode instructions, by request"
BUDGET = 300.0

SLOTS = 4
ROWS = 12
ADAPTERS = 300
WAITING = 1500
STEPS = 120


class Oracle:
    """The same line, as it is defined: walked from its beginning."""

    def __init__(self) -> None:
        self.line: dict[int, int] = {}  # request -> adapter, by arrival

    def arrive(self, request: int, adapter: int) -> None:
        self.line[request] = adapter

    def leave(self, request: int) -> None:
        del self.line[request]

    def admit(self, rows: int, held: frozenset[int], slots: int) -> list[int]:
        joined, held = [], set(held)
        for request, adapter in self.line.items():
            if len(joined) == rows:
                break
            if adapter and adapter not in held:
                if not slots:
                    continue
                slots -= 1
                held.add(adapter)
            joined.append(request)
        for request in joined:
            del self.line[request]
        return joined


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """Instructions of the answer's own functions, by requests that came; Refused where another request is admitted."""
    answer = load()
    line, oracle = answer.Line(), Oracle()
    numbers = iter(rng.sample(range(10**6), WAITING + 4 * STEPS))
    adapters = rng.sample(range(1, 10**6), ADAPTERS)
    came = 0
    running: dict[int, tuple[int, int]] = {}  # request -> (adapter, steps left)
    with bytecodes_of(answer) as count:
        for step in range(STEPS):
            for _ in range(WAITING if step == 0 else rng.randint(0, 4)):
                adapter = rng.choice([0, *adapters]) if rng.random() < 0.8 else adapters[0]
                request = next(numbers)
                line.arrive(request, adapter)
                oracle.arrive(request, adapter)
                came += 1
            if rng.random() < 0.3:
                gone = rng.choice(list(oracle.line))
                line.leave(gone)
                oracle.leave(gone)
            _step(line, oracle, running, rng)
    return count[0] / came


def _step(line: Any, oracle: Oracle, running: dict[int, tuple[int, int]], rng: Random) -> None:
    held = frozenset(adapter for adapter, _ in running.values() if adapter)
    asked = (ROWS - len(running), held, SLOTS - len(held))
    adapter_of = dict(oracle.line)
    wanted, found = oracle.admit(*asked), list(line.admit(*asked))
    if found != wanted:
        raise Refused(f"admit{asked} gave {found}, and the first in line that fit are {wanted}")
    for request in wanted:
        running[request] = (adapter_of[request], rng.randint(1, 8))
    for request, (adapter, left) in list(running.items()):
        running[request] = (adapter, left - 1)
        if left == 1:
            del running[request]
