"""Open exercises: our answers and their budgets, the rules, and who tries to get round them."""

import itertools
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from checkout import Checkout

from labs.kit import limits
from labs.kit import open_exercises as kit
from labs.kit.judges import eviction, keeping, placement, publishing, routing, sharing
from labs.kit.open_rules import broken_rules
from labs.kit.regions import ROOT, LabError
from labs.kit.sync import OPEN, OURS, sync
from tests.tools.nights import by_day

EXERCISES = {exercise.name: exercise for exercise in kit.open_exercises()}


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    """Enough for all but the test of rounds, in half the time."""
    monkeypatch.setattr(kit, "ROUNDS", 1)


def judged(name, text, seed=11):
    return kit.judge(EXERCISES[name], text, Path(f"/answers/{name}.py"), seed)


def naive_of(name):
    return EXERCISES[name].ours("naive").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", by_day(EXERCISES))
def test_the_naive_answer_misses_the_budget_and_ours_get_better(name):
    exercise = EXERCISES[name]

    naive, good, best = (judged(name, exercise.ours(which).read_text(encoding="utf-8")) for which in OURS)

    assert (naive.why, good.why, best.why) == ("", "", "")
    assert naive.count > exercise.judge.BUDGET >= good.count > best.count


@pytest.mark.parametrize("name", EXERCISES)
def test_a_starter_is_the_naive_answer_until_somebody_works_on_it(name):
    file = EXERCISES[name].file

    is_edited = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", file], cwd=ROOT).returncode == 1

    assert is_edited or file.read_text(encoding="utf-8") == naive_of(name)


def ignorant(name, **answers):
    """A class whose methods give the same whatever they are asked."""
    methods = {"__init__": None, **answers}.items()
    return f"class {name}:\n" + "".join(f"    def {m}(*_): return {answer!r}\n" for m, answer in methods)


IGNORES = {
    "header": ("def shapes(*_):\n    return {}\n", "shapes() is wrong: "),
    "packing": ("def write(*_):\n    pass\n", "A of slice 0 is wrong in the slot, first in row 0"),
    "mixed_batch": ("def add(*_):\n    pass\n", "y is wrong in "),
    "eviction": (ignorant("Policy", used=None, victim=None), "victim() gave None"),
    "turns": (ignorant("Policy", choose=[]), "0 tokens in 500"),
    "waiting_line": (
        ignorant("Line", arrive=None, leave=None, admit=[]),
        "gave [], and the first in line that fit are",
    ),
    "detokenizer": (ignorant("Detokenizer", push="", finish=""), "by now, and '' was given"),
    "keeping": (
        ignorant("Policy", used=None, left=None, victim=None),
        "victim() gave None, which is not there",
    ),
    "routing": (ignorant("Policy", choose=None), "choose() gave None, and engines are 0 to 3"),
    "placement": (ignorant("Policy", place={}), "the engines (), and it needs one or more of 0 to 3"),
    "sharing": (ignorant("Keys", of=[]), "of() gave [] keys; a prompt of "),
    "publishing": (ignorant("Policy", publish=None), "publish() gave None, and it is True or False"),
}
# An exercise, what of our naive answer is changed to what, and why it is refused then.
WRONG = {
    "half a character": (
        *("detokenizer", '"" if text.endswith("\\ufffd") else', ""),
        "was given, which it never says",
    ),
    "each token alone": (
        *("detokenizer", "self.decode(tokens)\n        return", "self.decode(tokens[-1:])\n        return"),
        "was given",
    ),
    "nothing at the end": (
        *("detokenizer", "self._rest(name, self.decode(self.tokens.pop(name)))", '""'),
        "ended as",
    ),
    "a kernel that computes nothing": (
        "shrink",
        "    tl.store(",
        "    return\n    tl.store(",
        "h is wrong in",
    ),
    "products of the host as a table": (
        *("shrink", "torch.tensor(slots)", "torch.ones(3)"),
        "table 0 of plan() is no tensor of integers",
    ),
    "a broken file taken for an empty one": (
        *("header", "raise ValueError", "return {} or str"),
        "shapes() takes a file whose header is said to be longer than the file",
    ),
    "nothing is published": (
        "publishing",
        "return True",
        "return False",
        "versions behind, and 6 is the most",
    ),
}


@pytest.mark.parametrize("name", IGNORES)
def test_who_ignores_the_input_is_refused(name):
    text, why = IGNORES[name]

    verdict = judged(name, text)

    assert verdict.count is None
    assert why in verdict.why


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_is_wrong_is_refused(what):
    name, old, new, why = WRONG[what]
    assert old in naive_of(name)

    verdict = judged(name, naive_of(name).replace(old, new))

    assert verdict.count is None
    assert why in verdict.why


REPLAYED = """
class Policy:
    victims = {victims}

    def __init__(self, slots):
        self.left = list(self.victims)

    def used(self, adapter):
        pass

    def victim(self, cached, wanted):
        return self.left.pop(0) if self.left else cached[0]
"""


def victims_of_belady(trace):
    """Who would leave, by who knows the trace."""
    cached, victims = set(), []
    for index, adapter in enumerate(trace):
        if adapter not in cached and len(cached) == eviction.SLOTS:
            rest = trace[index:]
            last = max(cached, key=lambda a: (rest.index(a) if a in rest else len(rest), a))
            cached.remove(last)
            victims.append(last)
        cached.add(adapter)
    return victims


def test_answers_worked_out_beforehand_are_of_no_use_on_other_inputs(monkeypatch):
    monkeypatch.setattr(eviction, "STEPS", 1500)
    known = eviction.trace_of(kit.Random(11))
    text = REPLAYED.format(victims=victims_of_belady(known))

    assert judged("eviction", text, seed=11).count == 0  # it would work, were the inputs known
    assert "which is not cached" in judged("eviction", text, seed=12).why


def least_by_trying(uses, places, cost, held=frozenset()):
    """What the cheapest way costs of all that can be dropped at each miss."""
    if not uses:
        return 0
    key, later = uses[0], uses[1:]
    if key in held:
        return least_by_trying(later, places, cost, held)
    if len(held) < places:
        return cost[key] + least_by_trying(later, places, cost, held | {key})
    return cost[key] + min(least_by_trying(later, places, cost, held - {gone} | {key}) for gone in held)


@pytest.mark.parametrize("seed", range(20))
def test_who_knows_the_future_pays_the_least_that_can_be_paid(seed):
    rng = kit.Random(seed)
    places, uses = rng.randint(1, 3), [rng.randint(1, 5) for _ in range(11)]
    cost = {key: rng.randint(1, 9) for key in range(1, 6)}

    assert keeping.least_cost(uses, places, cost.get) == pytest.approx(least_by_trying(uses, places, cost))


@pytest.mark.parametrize("name", ["keeping", "routing", "placement"])
def test_policies_that_have_a_name_stand_beside_an_answer(name, monkeypatch):
    judge = EXERCISES[name].judge
    monkeypatch.setattr(keeping if judge is keeping else routing, "REQUESTS", 1500)

    lines = judge.beside(kit.Random(3))

    shares = [float(line.split()[0]) for line in lines]
    assert [line.split("  ")[-1].partition(":")[0] for line in lines[:-1]] == [*judge.KNOWN]
    assert shares[-2:] == [1, 0]
    assert judge is placement or min(shares[:-2]) > 1  # each placement has a purpose


def test_a_request_waits_for_those_before_it_and_for_its_adapter(monkeypatch):
    """Memory of 40: adapters 1 and 2 fit together, and 3 drives out the one that was used longest ago."""
    monkeypatch.setattr(routing, "MEMORY", 40)
    ranks = {1: 10, 2: 20, 3: 30}
    traffic = routing.Traffic([(0, 1), (5, 2), (10, 1), (900, 3), (1000, 1)], ranks)
    seen = []

    def route(adapter, engines):
        seen.append([(engine.load, [key for key in ranks if engine.has(key)]) for engine in engines])
        return 0

    bill = routing.serve(route, traffic, engines=2)

    served, first, second, third = 40, 2.6 * 10, 2.6 * 20, 2.6 * 30
    ends = [first + served, first + second + 2 * served, first + second + 3 * served]
    ends += [900 + third + served, 900 + third + 2 * served]
    assert bill == (3, 5, pytest.approx(sum(ends) - 0 - 5 - 10 - 900 - 1000))
    assert [load for [(load, _), _] in seen] == [0, 1, 2, 0, 1]
    assert [held for [(_, held), _] in seen] == [[], [1], [1, 2], [1, 2], [1, 3]]
    assert all(other == (0, []) for [_, other] in seen)


def every_way(traffic, engines):
    """The milliseconds of each way to send the requests to engines."""
    for numbers in itertools.product(range(engines), repeat=len(traffic.uses)):
        left = iter(numbers)
        yield routing.serve(lambda *_, left=left: next(left), traffic, engines).ms


@pytest.mark.parametrize("seed", range(8))
def test_no_way_to_send_requests_takes_less_than_the_least(seed):
    rng = kit.Random(seed)
    uses = [(rng.uniform(0, 150), rng.randint(1, 3)) for _ in range(7)]
    without, real = ({key: rank * n for key, rank in zip((1, 2, 3), (8, 16, 64))} for n in (0, 1))
    free, read = (routing.Traffic(sorted(uses), ranks) for ranks in (without, real))

    least = routing.least_possible(free, engines=2)

    assert least == routing.least_possible(read, engines=2)
    assert min(every_way(free, 2)) == pytest.approx(least)  # nothing to read: it is the least that can be had
    assert min(every_way(read, 2)) > least


def test_routes_that_have_a_name_stand_beside_an_answer(monkeypatch):
    monkeypatch.setattr(routing, "REQUESTS", 1500)

    lines = routing.beside(kit.Random(3))

    assert [line.split("  ")[-1].partition(":")[0] for line in lines[:4]] == [*routing.KNOWN]
    shares = [float(line.split()[0]) for line in lines]
    assert shares[3:] == [1, 0] and min(shares[:3]) > 1


def test_a_placement_is_asked_every_two_seconds_and_holds_until_the_next():
    """Adapter 1 has both engines at first, then only the second; what is newly placed is a move."""
    traffic = routing.Traffic([(0, 1), (1, 1), (2, 1), (2500, 1), (6100, 2)], {1: 10, 2: 20})
    said, seen = iter([{1: [0, 1], 2: [0]}, {1: [1], 2: [1, 0]}, {1: [0], 2: [0]}, {1: [0], 2: [0]}]), []

    class Policy:
        def place(self, now, counts, placed):
            seen.append((now, counts, placed))
            return next(said)

    bill = placement.serve(Policy(), traffic)

    assert [now for now, _, _ in seen] == [0, 2000, 4000, 6000]
    assert [counts for _, counts, _ in seen] == [{1: 0, 2: 0}, {1: 3, 2: 0}, {1: 1, 2: 0}, {1: 0, 2: 0}]
    assert [placed for _, _, placed in seen[:2]] == [{}, {1: (0, 1), 2: (0,)}]
    assert bill.moves == 2  # 2 to engine 1, and 1 back to engine 0
    # 1 is read by both engines, and 2 by one; the third request waits for the first on engine 0.
    assert bill.reads == 3
    first, second = 26 + 40, 52 + 40
    assert bill.ms == pytest.approx(first + first + (first + 40 - 2) + 40 + second)


# What may be left out of a key, and is wrong to leave out: a part of our best answer, and what takes its place.
TOO_LITTLE = {
    "where the adapter begins": ("(tokens, start, whose) if", "(tokens, whose) if"),
    "the weights": ("(tokens, start, whose) if", "(tokens, start) if"),
    "the tokens before the block": (
        "self._of_block(tuple(tokens[:end])",
        "self._of_block(tuple(tokens[end - 8 : end])",
    ),
    "the layer's own k and v": ("of < layer or (of == layer and module in WRITES)", "of < layer"),
    "v": ('WRITES = ("k", "v")', 'WRITES = ("k",)'),
    "layers below": ("of < layer or (of == layer", "(of == layer"),
    "all but what writes cells": ("return of < layer or (of == layer and", "return (of <= layer and"),
    "a block in which the adapter begins": (
        "if start < len(tokens) and whose",
        "if start <= len(tokens) - 8 and whose",
    ),
}


@pytest.mark.parametrize("what", TOO_LITTLE)
def test_keys_that_leave_something_out_are_refused(what):
    old, new = TOO_LITTLE[what]
    best = EXERCISES["sharing"].ours("best").read_text()
    assert best.count(old) == 1

    verdict = judged("sharing", best.replace(old, new))

    assert verdict.count is None
    assert "would be answered from wrong KV: block " in verdict.why


def test_cells_hold_what_a_model_with_such_layers_computes_for_them():
    """Float64 numbers of a small model: alike where the contents are the same, and only there."""
    requests = sharing.traffic_of(kit.Random(5))[:40]
    contents, values = sharing.Contents(), {}

    for request in requests:
        for cells, computed in zip(contents.of(request), computed_cells(request), strict=True):
            for content, numbers in zip(cells, computed, strict=True):
                assert values.setdefault(content, numbers) == pytest.approx(numbers, abs=1e-12)

    assert len({tuple(round(x, 9) for x in numbers) for numbers in values.values()}) == len(values)


def computed_cells(request):
    """A layer's keys and values at the last token of each full block, of a model of width 3 with sums for attention."""
    tokens, start, weights = request
    hidden = [np.random.default_rng(token).normal(size=3) for token in tokens]
    layers = []
    for layer in range(sharing.LAYERS):

        def weight(module, place, layer=layer):
            number = weights.get((layer, module), 0) if place >= start else 0
            return np.random.default_rng([number, layer, sharing.MODULES.index(module)]).normal(size=(3, 3))

        keys = [weight("k", place) @ h for place, h in enumerate(hidden)]
        values = [weight("v", place) @ h for place, h in enumerate(hidden)]
        cells = [np.sum(keys[: n + 1], axis=0) @ np.ones(3) * (n + 1) + values[n] for n in range(len(tokens))]
        summed = []
        for place, h in enumerate(hidden):
            asked = weight("q", place) @ h
            scores = np.exp(np.clip([asked @ key for key in keys[: place + 1]], -5, 5))
            seen = np.sum([s * value for s, value in zip(scores, values)], axis=0) / scores.sum()
            summed.append(np.tanh(h + weight("mlp", place) @ np.tanh(weight("o", place) @ seen)))
        hidden = summed
        layers.append([tuple(cell) for cell in cells[sharing.BLOCK - 1 :: sharing.BLOCK]])
    return [list(cells) for cells in zip(*layers)]


def test_ways_to_share_that_have_a_name_stand_beside_an_answer():
    shares = [float(line.split()[0]) for line in sharing.beside(kit.Random(3))]

    assert shares[0] > shares[1] > sharing.BUDGET


def test_a_publication_stalls_all_that_run_or_wait_and_an_answer_is_of_what_serves_when_it_ends(monkeypatch):
    """By hand: two requests of 10 and 20 tokens that answer 3 each, a version at 20 ms and one at 30 ms."""
    monkeypatch.setattr(publishing, "BATCH", 1)
    traffic = publishing.Traffic(
        [publishing.Arrival(0, 10, 3), publishing.Arrival(1, 20, 3)], versions=[20.0, 30.0]
    )
    asked = []

    class SecondTime:
        def publish(self, now, behind, running, waiting):
            asked.append((now, behind, running, waiting))
            return len(asked) == 2

    bill = publishing.serve(SecondTime(), traffic)

    # Steps end at 12.5, 24.5 and, for the first one, at 36.5: version 1 is there at 24.5, and both by 36.5.
    assert asked[:2] == [(24.5, 1, [(12, 1)], 1), (36.5, 2, [], 1)]
    assert bill == publishing.Bill(published=1, stalls=15.0, behind=1)
    assert bill.ms == 15.0 + 200.0


# A policy's row on the board of an exercise, after its name.
ROWS = {
    "sharing": lambda bill, share: f"{bill.cells:,} | {share:.3f}",
    "keeping": lambda bill, share: f"{bill.reads:,} | {bill.copies:,} | {bill.ms / 1e3:,.1f} | {share:.3f}",
    "routing": lambda bill, share: f"{bill.reads:,} | {bill.busiest:,} | {bill.ms / 1e3:,.1f} | {share:.3f}",
    "publishing": lambda bill, share: (
        f"{bill.published} | {bill.stalls / 1e3:.0f} | {bill.behind:,} | {share:.3f}"
    ),
    "placement": lambda bill, share: f"{bill.reads:,} | {bill.moves:,} | {bill.ms / 1e3:,.1f} | {share:.3f}",
}


@pytest.mark.parametrize("name", by_day(ROWS))
def test_a_board_is_what_the_judge_says(name):
    exercise, judge = EXERCISES[name], EXERCISES[name].judge
    traffic = (routing if name == "placement" else judge).traffic_of(kit.Random(17))
    text = (ROOT / "solutions" / exercise.phase / "README.md").read_text(encoding="utf-8")

    for who, policy in policies_of(name, traffic):
        bill = judge.serve(policy, traffic)
        share = bill.cells / bill.least if name == "sharing" else judge.share(bill, traffic)
        rows = [row for row in text.split("\n") if row.endswith(f" | {ROWS[name](bill, share)} |")]
        assert [row for row in rows if who in row or "the starter" in row], who
    if name in ("placement", "keeping", "routing"):
        least = (keeping if name == "keeping" else routing).least_possible(traffic)
        assert f" | {least / 1e3:.1f} | 0 |" in text


def policies_of(name, traffic):
    """Those that have a name, and our answers, each as the judge takes it."""
    exercise, known = EXERCISES[name], EXERCISES[name].judge.KNOWN
    answers = {f"ours, {w}": kit.load(exercise.ours(w).read_text(), exercise.ours(w)) for w in OURS}
    if name == "sharing":
        return [*known.items(), *((who, answer.Keys) for who, answer in answers.items())]
    ours = {who: answer.Policy for who, answer in answers.items()}
    if name == "keeping":
        return [*known.items(), *ours.items()]
    if name == "routing":
        known = {who: make() for who, make in known.items()}
        return [*known.items(), *((who, make(traffic.ranks).choose) for who, make in ours.items())]
    given = (traffic.ranks, placement.ENGINES, placement.MEMORY) if name == "placement" else ()
    return [(who, make(*given)) for who, make in [*known.items(), *ours.items()]]


def test_the_second_of_a_phase_is_called_by_its_name():
    assert [exercise.key for exercise in kit.open_exercises("10")] == ["open 10"]
    assert [exercise.key for exercise in kit.open_exercises("placement")] == ["open placement"]
    assert [exercise.name for exercise in kit.open_exercises("keeping")] == ["keeping"]


def test_inputs_differ_from_one_judgement_to_the_next():
    assert len({kit.fresh_seed() for _ in range(8)}) == 8


def test_of_several_rounds_the_worst_counts(monkeypatch):
    alone = [judged("turns", naive_of("turns"), seed=seed).count for seed in (13, 14, 15)]

    monkeypatch.setattr(kit, "ROUNDS", 3)

    assert len(set(alone)) > 1
    assert judged("turns", naive_of("turns"), seed=13).count == max(alone)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import sys", "may not import sys"),
        ("import numpy", "may not import numpy"),
        ("from labs.kit.judges import counting", "may not import labs.kit.judges"),
        ("import torch.utils._python_dispatch", "may not import torch.utils._python_dispatch"),
        ("from torch import utils", "may not import utils"),
        ("x = y.numpy()", "may not use `.numpy`"),
        ("x = torch.ops.aten.mm", "may not use `.ops`"),
        ("x = len.__globals__", "may not reach for `__globals__`"),
        ("x = other._count", "may not reach for `_count`"),
        ("x = getattr(y, 'numpy')", "may not use `getattr`"),
        ("x = __import__('gc')", "may not use `__import__`"),
        ("torch.Tensor.copy_ = 3", "sets attributes of `self` alone, not `torch.Tensor.copy_`"),
        ("exec('import sys')", "may not use `exec`"),
        ("def f(:", "invalid syntax"),
        ("from torch import *", "may not import *"),
        ("import torch as tl", "may call nothing `tl` but triton.language"),
        ("import torch as triton", "may call nothing `triton` but triton"),
        ("import torch.nn as tl", "may not import torch.nn"),
        ("from triton import testing as tl", "may call nothing `tl` but triton.language"),
        ("tl = torch", "may call nothing `tl`"),
        ("[tl := torch]", "may call nothing `tl`"),
        ("for x, (tl, *y) in z: pass", "may call nothing `tl`"),
        ("def f(x, *tl): pass", "may call nothing `tl`"),
        ("f = lambda tl: tl.load", "may call nothing `tl`"),
        ("class triton: pass", "may call nothing `triton`"),
        ("with x as tl: pass", "may call nothing `tl`"),
        ("match x:\n    case {**tl}: pass", "may call nothing `tl`"),
    ],
)
def test_what_reaches_the_counter_the_future_or_unseen_arithmetic_is_refused(line, said):
    [*broken] = broken_rules(f"x = 1\n{line}\n")

    assert broken
    assert said in broken[0]
    last = 2 + line.count("\n")
    assert broken[0].startswith(f"line {last}: ")


@pytest.mark.parametrize("line", ["import triton.language as tl", "from triton import language as tl"])
def test_kernels_load_and_are_compiled(line):
    text = f"import triton\nimport triton.language\n{line}\nf(tl=1)\n@triton.jit\ndef kernel(x): tl.load(x)\n"

    assert broken_rules(text) == []


def test_an_answer_that_breaks_a_rule_is_not_run():
    verdict = judged("eviction", "import gc\n\n\nraise SystemExit\n")

    assert verdict.why.startswith("line 1: an answer may not import gc")


@pytest.mark.parametrize(
    ("name", "before", "changed"),
    [
        ("turns", "        keep = [", "        stalled.clear()\n        held.pop(0, None)\n"),
        ("publishing", "        return True", "        running.clear()\n"),
    ],
)
def test_what_a_policy_changes_in_its_arguments_changes_nothing(name, before, changed):
    text = naive_of(name).replace(before, changed + before)

    assert judged(name, text) == judged(name, naive_of(name))


def test_memory_taken_while_the_file_is_loaded_counts():
    best = EXERCISES["packing"].ours("best").read_text(encoding="utf-8")
    text = best.replace("\n\ndef write(", "\n\nSCRATCH = torch.empty(1 << 18)\n\n\ndef write(", 1)

    assert judged("packing", text).count > EXERCISES["packing"].judge.BUDGET


def test_an_answer_that_raises_is_refused_with_its_line():
    text = "class Policy:\n    def __init__(self, slots):\n        raise KeyError(slots)\n"

    assert judged("eviction", text).why == "KeyError: 16 (line 3)"


@pytest.mark.parametrize(
    "body", by_day(["import itertools\nsum(itertools.repeat(0))\n", "while True:\n    pass\n"])
)
def test_an_answer_that_does_not_end_is_ended_when_it_takes_many_times_as_long_as_ours(monkeypatch, body):
    monkeypatch.setattr(kit, "ASK", 0.25)
    monkeypatch.setattr(kit, "_seconds_of_ours", lambda exercise, seed: 0.05)
    monkeypatch.setattr(limits, "LEAST", 0.5)

    assert judged("turns", body) == (None, "no end after 1 s of computing")


def test_an_answer_that_is_slow_is_judged(monkeypatch):
    """It computes for longer than it is allowed until it is known how long ours does."""
    monkeypatch.setattr(kit, "ASK", 0.2)
    monkeypatch.setattr(kit, "_seconds_of_ours", lambda exercise, seed: 1.0)
    slow = "for n in range(20_000_000):\n    pass\n\n"

    assert judged("eviction", slow + naive_of("eviction")) == judged("eviction", naive_of("eviction"))


def test_an_answer_that_takes_all_memory_is_refused():
    assert judged("turns", "held = bytearray(5 << 30)\n").why.startswith("MemoryError")


def test_a_phase_without_one_is_named():
    with pytest.raises(
        LabError,
        match="phase '8' has no open exercise: give one of 1, 2, 3, 4, 5, 6, 7, 9, 10, placement, 11, 12, 13",
    ):
        kit.open_exercises("8")


def test_an_untouched_starter_follows_our_naive_answer_and_somebodys_answer_stays(tmp_path):
    """In a checkout with nothing but our naive answers."""
    files = {}
    for name, phase in OPEN.items():
        naive = tmp_path / "solutions" / phase / f"open_{name}_naive.py"
        naive.parent.mkdir(parents=True, exist_ok=True)
        naive.write_text(f"# naive {name}\n")
        files[name] = tmp_path / "labs" / phase / f"open_{name}.py"
    (tmp_path / "labs").mkdir()
    sync(tmp_path)
    files["turns"].write_text("# mine\n")
    for name in ("eviction", "turns"):
        (tmp_path / "solutions" / OPEN[name] / f"open_{name}_naive.py").write_text("# another\n")

    sync(tmp_path)

    assert files["eviction"].read_text() == "# another\n"
    assert files["turns"].read_text() == "# mine\n"
    recorded = json.loads((tmp_path / "labs/open_starters.json").read_text())
    assert recorded.keys() == {f"{phase}/open_{name}" for name, phase in OPEN.items()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("open"))


def test_lab_says_what_became_of_an_answer_and_forgets_it_when_the_answer_changes(checkout):
    exercise = EXERCISES["eviction"]
    name, file = f"{exercise.key}: {exercise.title}", checkout.root / exercise.file.relative_to(ROOT)
    best = exercise.ours("best").read_text(encoding="utf-8")

    untouched = checkout.lab("open", exercise.call)
    before = checkout.lab("open")
    file.write_text(best)
    judged_best = checkout.lab("open", exercise.call)
    passed = checkout.lab("open")
    report = json.loads(checkout.lab("grade", exercise.number, "--json").stdout)
    file.write_text(best + "\n")
    changed = checkout.lab("open")
    file.write_text(f"import gc\n{best}")
    refused = checkout.lab("open", exercise.call)
    of_one = json.loads(checkout.lab("grade", f"{exercise.number}.1", "--json").stdout)

    assert (untouched.returncode, judged_best.returncode, refused.returncode) == (1, 0, 1)
    assert [row.split()[0] for row in untouched.stdout.splitlines() if "ours, " in row] == ["✓", "✓", "✗"]
    assert f"· {name}" in before.stdout
    assert f"✓ {name}" in passed.stdout
    assert f"~ {name}" in changed.stdout
    assert "yours is refused: line 1: an answer may not import gc" in refused.stdout
    # Grades count open exercises apart.
    [entry] = report["open"]
    budget = exercise.judge.BUDGET
    assert (entry["exercise"], entry["state"], entry["budget"]) == (exercise.key, "passed", budget)
    assert entry["count"] <= budget
    assert report["points"] == 0
    assert of_one["open"] == []
