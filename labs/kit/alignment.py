"""Two engines' steps side by side, and in sentences what is not alike in a pair of them.

A step is a line of `labs.kit.recording`. When it began is no difference.
"""

from collections.abc import Callable, Iterator
from typing import Any

Step = dict[str, Any]
Pair = tuple[int | None, int | None]  # indices of two steps that stand side by side; None = a gap

GAP = 0.6  # what it costs to leave a step alone; two steps that share no row cost 1
ALMOST = 0.05  # two steps with the same rows that differ in something else
LARGEST = 1_000_000  # pairs; above, steps go side by side in order
MOST_SENTENCES = 4  # about one thing

# How far logits may be apart that are alike, in parts of the largest: the order of a sum is free.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3}
HALF_TOLERANCE = 0.05


def align(yours: list[Step], ours: list[Step]) -> list[Pair]:
    """Every step once, in order. The first two that differ stand side by side, those after them as is cheapest."""
    start = 0
    while start < min(len(yours), len(ours)) and not differences(yours[start], ours[start]):
        start += 1
    start += start < min(len(yours), len(ours))
    rest = _cheapest(yours[start:], ours[start:])
    both = [(i, i) for i in range(start)]
    return both + [(_plus(a, start), _plus(b, start)) for a, b in rest]


def _plus(index: int | None, start: int) -> int | None:
    return None if index is None else index + start


def _cheapest(yours: list[Step], ours: list[Step]) -> list[Pair]:
    """The pairs of least cost: edit distance."""
    rows, columns = len(yours), len(ours)
    if rows * columns > LARGEST:
        return [(i if i < rows else None, i if i < columns else None) for i in range(max(rows, columns))]
    cost = [[(i + j) * GAP for j in range(columns + 1)] for i in range(rows + 1)]
    step = [["left" if not i else "up" for _ in range(columns + 1)] for i in range(rows + 1)]
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            beside = cost[i - 1][j - 1] + distance(yours[i - 1], ours[j - 1])
            up, left = cost[i - 1][j] + GAP, cost[i][j - 1] + GAP
            cost[i][j] = min(beside, up, left)
            step[i][j] = "beside" if cost[i][j] == beside else "up" if cost[i][j] == up else "left"
    pairs, i, j = [], rows, columns
    while i or j:
        way = step[i][j]
        i, j = i - (way != "left"), j - (way != "up")
        pairs.append((None if way == "left" else i, None if way == "up" else j))
    return pairs[::-1]


def distance(a: Step, b: Step) -> float:
    """0 for equal steps, up to 1 for steps that share no row."""
    mine, theirs = _rows(a), _rows(b)
    if mine == theirs:
        return ALMOST if differences(a, b) else 0.0
    return max(ALMOST, 1 - len(mine & theirs) / len(mine | theirs))


def _rows(step: Step) -> set[tuple]:
    return {(row["request"], row["tokens"], row["kind"]) for row in step["rows"]}


def differences(yours: Step, ours: Step) -> list[str]:
    """What is not alike, in the order in which a step does it: first what may be the cause of the rest."""
    found = []
    # Of a step that broke off before it was launched there is no record: nothing else of it counts.
    is_broken = not yours["rows"] and ours["rows"] and (yours.get("error") or yours.get("errors"))
    for name, sentences in ASPECTS[-1:] if is_broken else ASPECTS:
        said = [f"{name}: {sentence}" for sentence in sentences(yours, ours)]
        found += said[:MOST_SENTENCES]
        if len(said) > MOST_SENTENCES:
            found.append(f"{name}: and {len(said) - MOST_SENTENCES} more")
    return found


def _by_request(yours: Step, ours: Step, what: str) -> Iterator[tuple[str, Step | None, Step | None]]:
    """Each request that either step names in a list: its entry in yours and in ours, None where it has none."""
    mine, theirs = ({entry["request"]: entry for entry in step[what]} for step in (yours, ours))
    for request in {**theirs, **mine}:
        yield request, mine.get(request), theirs.get(request)


def _alone(a: Step | None) -> tuple[str, str]:
    """Whose entry it is, and who has none."""
    return ("ours", "yours") if a is None else ("yours", "ours")


def _rows_differ(yours: Step, ours: Step) -> Iterator[str]:
    for request, a, b in _by_request(yours, ours, "rows"):
        if a is None or b is None:
            who, other = _alone(a)
            yield f"{who} computes {_work(a or b)} of {_named(a or b)}, {other} nothing of it"
        elif a["adapter"] != b["adapter"]:
            yield f"{request} has {_adapter(a)} in yours, {_adapter(b)} in ours"
        elif (a["tokens"], a["kind"]) != (b["tokens"], b["kind"]):
            yield f"of {_named(a)} yours computes {_work(a)}, ours {_work(b)}"
        elif a["cached"] != b["cached"]:
            yield f"yours finds {a['cached']} tokens of {_named(a)} in the prefix cache, ours {b['cached']}"
    mine, theirs = ([row["request"] for row in step["rows"]] for step in (yours, ours))
    if mine != theirs and set(mine) == set(theirs):
        yield f"their order is {', '.join(mine)} in yours, {', '.join(theirs)} in ours"


def _work(row: Step) -> str:
    return "a token of the answer" if row["kind"] == "decode" else f"{row['tokens']} tokens of the prompt"


def _adapter(row: Step) -> str:
    return "the base model" if row["adapter"] is None else f"adapter '{row['adapter']}'"


def _named(row: Step) -> str:
    return f"{row['request']} ({row['adapter'] or 'base model'})"


def _queue_differs(yours: Step, ours: Step) -> Iterator[str]:
    for _, a, b in _by_request(yours, ours, "skipped"):
        if a is None or b is None:
            who, other = _alone(a)
            yield f"{who} passes over {_named(a or b)}: {(a or b)['reason']}; {other} does not"
        elif a["reason"] != b["reason"]:
            yield f"{_named(a)} is passed over in yours for {a['reason']}, in ours for {b['reason']}"
    if yours["waiting"] != ours["waiting"]:
        first, second = (", ".join(step["waiting"][:6]) or "nobody" for step in (yours, ours))
        yield f"there wait {first} in yours, {second} in ours"


def _lists_differ(
    key: str, does: str, text: Callable[[Any], str] = str
) -> Callable[[Step, Step], Iterator[str]]:
    def sentences(yours: Step, ours: Step) -> Iterator[str]:
        mine, theirs = ([text(each) for each in step[key]] for step in (yours, ours))
        if mine != theirs:
            first, second = (", ".join(names) or "nothing" for names in (mine, theirs))
            yield f"yours {does} {first}, ours {second}"

    return sentences


def _event(event: Step) -> str:
    return f"'{event['adapter']}' (slot {event['slot']})"


def _slots_differ(yours: Step, ours: Step) -> Iterator[str]:
    if len(yours["slots"]) != len(ours["slots"]):
        yield f"there are {len(yours['slots'])} in yours, {len(ours['slots'])} in ours"
        return
    for slot, (a, b) in enumerate(zip(yours["slots"], ours["slots"])):
        if a != b:
            first, second = ("nothing" if held is None else f"'{held}'" for held in (a, b))
            yield f"slot {slot} holds {first} in yours, {second} in ours"


def _memory_differs(yours: Step, ours: Step) -> Iterator[str]:
    for key, text in (("in_memory", "adapters in memory"), ("kv_blocks", "blocks held by requests")):
        if yours[key] != ours[key]:
            yield f"{yours[key]} {text} in yours, {ours[key]} in ours"


def _logits_differ(yours: Step, ours: Step) -> Iterator[str]:
    adapters = {row["request"]: row for row in yours["rows"]}
    both = [request for request in ours.get("logits", {}) if request in yours.get("logits", {})]
    apart = {request: _apart(yours["logits"][request], ours["logits"][request]) for request in both}
    wrong = {request: by for request, by in apart.items() if by is not None}
    for request, by in wrong.items():
        yield f"those of {_named(adapters.get(request, {'request': request, 'adapter': None}))} are {by}"
    if wrong and len(wrong) < len(both):
        alike = [request for request in both if request not in wrong]
        yield f"those of {', '.join(alike[:6])} are alike"


def _apart(yours: Step, ours: Step) -> str | None:
    """In words, how far two rows' logits are apart; None for alike."""
    limit = TOLERANCE.get(ours["dtype"], HALF_TOLERANCE) * max(1.0, abs(ours["largest"]))
    pairs = list(zip([*yours["values"], yours["largest"]], [*ours["values"], ours["largest"]]))
    if any(a != a and b == b for a, b in pairs):
        return "nan in yours"
    largest = max((abs(a - b) for a, b in pairs if a != b), default=0.0)
    return f"up to {largest:.3g} apart" if largest > limit else None


def _tokens_differ(yours: Step, ours: Step) -> Iterator[str]:
    mine, theirs = yours.get("tokens", {}), ours.get("tokens", {})
    for request in {**theirs, **mine}:
        if mine.get(request) != theirs.get(request):
            yield f"{request} gets {_token(yours, request)} in yours, {_token(ours, request)} in ours"


def _token(step: Step, request: str) -> str:
    if request not in step.get("tokens", {}):
        return "none"
    text = step.get("texts", {}).get(request)
    return f"{step['tokens'][request]}" + (f" ({text!r})" if text is not None else "")


def _errors_differ(yours: Step, ours: Step) -> Iterator[str]:
    mine, theirs = yours.get("errors", {}), ours.get("errors", {})
    for request in {**theirs, **mine}:
        if mine.get(request) != theirs.get(request):
            a, b = (errors.get(request, "does not fail") for errors in (mine, theirs))
            yield f"{request} in yours: {a}; in ours: {b}"
    if yours.get("error") != ours.get("error"):
        yield f"yours raises {yours.get('error') or 'nothing'}; ours {ours.get('error') or 'nothing'}"


ASPECTS: tuple[tuple[str, Callable[[Step, Step], Iterator[str]]], ...] = (
    ("rows", _rows_differ),
    ("queue", _queue_differs),
    ("preemptions", _lists_differ("preempted", "preempts")),
    ("loads", _lists_differ("loads", "reads")),
    ("memory", _lists_differ("drops", "drops")),
    ("evictions", _lists_differ("evictions", "evicts", _event)),
    ("slots", _slots_differ),
    ("pins", _lists_differ("pinned", "has pinned")),
    ("memory", _memory_differs),
    ("logits", _logits_differ),
    ("tokens", _tokens_differ),
    ("errors", _errors_differ),
)
