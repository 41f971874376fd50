"""Open exercise of phase 12: keys by which requests share all the KV that is alike, and none that is not."""

from collections.abc import Callable, Hashable, Mapping
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from labs.kit.judges import Refused

TITLE = "keys for KV cells: share what variants of an adapter have alike, and nothing else"
UNIT = "KV cells that are kept, for each that differs"
BUDGET = 1.1

LAYERS, BLOCK, REQUESTS = 6, 8, 160
MODULES = ("q", "k", "v", "o", "mlp")
KINDS = (("q", "v"), ("q", "k", "v", "o"), ("o", "mlp"), MODULES)  # what adapters adapt
# These write a layer's keys and values; the others make what comes out of the layer.
OF_CELL = ("k", "v")

Weights = Mapping[tuple[int, str], int]


class Request(NamedTuple):
    """tokens: of its prompt; start: the first that the adapter computes; weights: see the starter"""

    tokens: tuple[int, ...]
    start: int
    weights: Weights


class Bill(NamedTuple):
    """cells: that are kept by an answer's keys; least: that differ"""

    cells: int
    least: int


def traffic_of(rng: Random) -> list[Request]:
    """Conversations that begin alike, and families of adapters: each variant was trained on from another one."""
    fingerprint = iter(range(1, 10**6)).__next__
    kinds, lowest = rng.sample(KINDS, 4), rng.sample((0, 1, 2, 3), 4)
    families = [family(rng, fingerprint, *which) for which in zip(kinds, lowest)]
    variants = [variant for variants in families for variant in variants]
    systems = [some_tokens(rng, rng.randint(10, 50)) for _ in range(5)]
    requests: list[Request] = []
    while len(requests) < REQUESTS:
        talk = rng.choice(systems) + some_tokens(rng, rng.randint(5, 60))
        for _ in range(rng.randint(1, 6)):  # several adapters are asked about one conversation
            tokens = talk + some_tokens(rng, rng.choice((0, 0, rng.randint(1, 20))))
            weights = rng.choice([{}, *variants, *variants])
            start = rng.choice((0, len(talk), rng.randrange(len(tokens)))) if weights else len(tokens)
            requests.append(Request(tokens, start, weights))
    return requests[:REQUESTS]


def family(
    rng: Random, fingerprint: Callable[[], int], modules: tuple[str, ...], lowest: int
) -> list[Weights]:
    """Four variants of one adapter, which leave some layers and modules as they were.

    modules, lowest   what it adapts, and from which layer on
    """
    found: list[Weights] = [
        {(layer, module): fingerprint() for layer in range(lowest, LAYERS) for module in modules}
    ]
    for begin in rng.sample(range(1, LAYERS), 3):
        trained, before = rng.sample(modules, rng.randint(1, len(modules))), rng.choice(found)
        again = {key: fingerprint() for key in before if key[0] >= begin and key[1] in trained}
        found.append({**before, **again})
    return found


def some_tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000) for _ in range(count))


class Contents:
    """What stands in KV cells, as numbers: two are equal if all that is computed on the way to them is the same."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def _number(self, *made_of: Hashable) -> int:
        return self._numbers.setdefault(made_of, len(self._numbers))

    def of(self, request: Request) -> list[list[int]]:
        """A number for each layer of each full block."""
        tokens, start, weights = request
        hidden = [self._number("token", token) for token in tokens]
        by_layer = []
        for layer in range(LAYERS):
            mine = {module: weights.get((layer, module)) for module in MODULES}
            before, seen = 0, []
            for place, entering in enumerate(hidden):
                own = {} if place < start else mine
                wrote = [own.get(module) for module in OF_CELL]
                before = self._number("cell", layer, before, entering, *wrote)  # with all cells before it
                rest = [own.get(module) for module in MODULES if module not in OF_CELL]
                seen.append(before)
                hidden[place] = self._number("hidden", layer, entering, before, *rest)
            by_layer.append(seen[BLOCK - 1 :: BLOCK])
        return [list(cells) for cells in zip(*by_layer)]


def serve(make: Callable[[int, int], Any], requests: list[Request]) -> Bill:
    """How many cells are kept. Refused where a key stands for two contents: a request would get another's KV."""
    keys, contents = make(LAYERS, BLOCK), Contents()
    kept: dict[Hashable, tuple[int, int]] = {}  # key -> its content, and whose it was
    for number, request in enumerate(requests):
        cells = contents.of(request)
        given = keys.of(list(request.tokens), request.start, dict(request.weights))
        if len(given) != len(cells) or any(len(layers) != LAYERS for layers in given):
            raise Refused(
                f"of() gave {[len(layers) for layers in given]} keys; a prompt of {len(request.tokens)} tokens has "
                f"{len(cells)} full blocks of {LAYERS} layers"
            )
        for block, (layers, wanted) in enumerate(zip(given, cells)):
            for layer, (key, content) in enumerate(zip(layers, wanted)):
                known, whose = kept.setdefault((layer, key), (content, number))
                if known != content:
                    raise Refused(
                        f"request {number} would be answered from wrong KV: block {block} of layer {layer} has the key "
                        f"of a block of request {whose}, whose keys and values are others"
                    )
    return Bill(len(kept), len({content for content, _ in kept.values()}))


class ByAdapter:
    """Each variant keeps all cells for itself, as vLLM 0.22.1 does."""

    def __init__(self, layers: int, block: int) -> None:
        self.layers, self.block = layers, block

    def of(self, tokens: list[int], start: int, weights: Weights) -> list[list[Hashable]]:
        whose = tuple(sorted(weights.items()))
        ends = range(self.block, len(tokens) + 1, self.block)
        return [[(whose, start if whose else 0, tuple(tokens[:end]))] * self.layers for end in ends]


class ByBlock(ByAdapter):
    """Blocks before an adapter begins are the base model's, and all others the adapter's, as with an activated LoRA."""

    def of(self, tokens: list[int], start: int, weights: Weights) -> list[list[Hashable]]:
        whose = tuple(sorted(weights.items()))
        ends = range(self.block, len(tokens) + 1, self.block)
        return [
            [(whose if end > start else (), min(start, end) if whose else end, tuple(tokens[:end]))]
            * self.layers
            for end in ends
        ]


KNOWN = {"by adapter": ByAdapter, "by block": ByBlock}


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    bill = serve(load().Keys, traffic_of(rng))
    return bill.cells / bill.least


def beside(rng: Random) -> list[str]:
    """What ways that have a name come to on the same input: a line each."""
    requests = traffic_of(rng)
    bills = {name: serve(make, requests) for name, make in KNOWN.items()}
    return [
        f"{bill.cells / bill.least:10.4g}  {name}: {bill.cells:,} cells of {bill.least:,}"
        for name, bill in bills.items()
    ]
