"""`lab league`: who is ahead, what no policy beats, submissions that are wrong, and traffics that are kept apart."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from labs.kit import league, league_compete, league_entrants
from labs.kit.cli import app
from labs.kit.commands.league import board, cells, everything, page, picture
from labs.kit.league import Traffic, apart, bounds, play
from labs.kit.league_bounds import least_alone, least_flow, least_ttft, step_floor
from labs.kit.league_compete import Result, compete
from labs.kit.league_entrants import OURS, Entrant, FirstInFirstOut, of_exercise, of_file, read_submissions
from labs.kit.overlay import Source
from labs.kit.regions import LabError, read_engine
from minivllm.policies import routing
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.traffic import Arrival
from tests.tools.nights import by_day

SECRET = "nobody guesses this line"
TINY = Traffic("tiny", {"requests": 40, "adapters": 40, "rate": 30.0, "adapter_mix": "thrash"})
ENGINES_OWN = OURS[0]
ROUTES_LIKE_US = "from minivllm.policies.routing import least_loaded\nrouting = lambda seed: least_loaded\n"


@pytest.fixture(scope="module")
def least():
    return {"tiny": bounds(TINY)}


def known(name):
    [entrant] = [entrant for entrant in OURS if entrant.name == f"ours: {name}"]
    return entrant


@pytest.fixture
def costs(monkeypatch):
    """Sets what steps and reads cost; a copy costs nothing."""

    def costs(of_steps, **options):
        cost = CostModel(of_steps, copy_bytes_per_s=1e15, read_bytes_per_s=1e15, **options)
        monkeypatch.setattr(league, "cost_model", lambda: cost)
        return cost

    return costs


# Who is ahead.


def test_a_play_is_what_is_worked_out_by_hand(costs):
    """Two adapters come to two engines. The last request finds its adapter where it was sent to, or reads it again.

    A step takes a second and a read ten, whatever their size.
    """
    costs({"steps": 1.0}, read_s=10.0)
    arrivals = [Arrival(t, 4, 1, adapter) for t, adapter in ((0.0, 0), (0.0, 1), (20.0, 0), (40.0, 1))]

    least_loaded, affine = (
        play(makers, arrivals, 2, 0) for makers in ({}, {"routing": routing.POLICIES["affine"]})
    )

    assert least_loaded["ttft_ms"] == pytest.approx(1e3 * (11 + 11 + 1 + 11) / 4, abs=1e-3)
    assert affine["ttft_ms"] == pytest.approx(1e3 * (11 + 11 + 1 + 1) / 4, abs=1e-3)
    assert (least_loaded["reads"], affine["reads"]) == (3, 2)
    assert least_loaded["hits"] == affine["hits"] == 2


def test_the_table_is_what_is_worked_out_by_hand():
    """Half of the engine's time beyond the bound, all of it, and on a traffic that nobody sees twice as much."""
    traffics = [Traffic("a", {}), Traffic("b", {}), Traffic("apart 1", {}, is_apart=True)]
    least = {"a": bound(100, 5), "b": bound(50, 6), "apart 1": bound(10, 7)}
    own, mine = Result("own", figures(300, 450, 110)), Result("mine", figures(200, 450, 210))

    found = board([own, mine, Result("other", {}, "KeyError: 3")], traffics, least)

    assert cells(found, "ttft_ms") == [
        ["", "score", "apart", "a", "b"],
        ["own", "1.00", "1.00", "300", "450"],
        ["mine", "1.17", "2.00", "200", "450"],
        ["no policy beats", "0", "0", "100", "50"],
    ]
    assert cells(found, "reads")[-1] == ["no policy beats", "0", "0", "5", "6"]
    assert found.out == {"other": "KeyError: 3"}


def bound(ttft_ms, reads):
    return {"ttft_ms": ttft_ms, "reads": reads, "hits": 9}


def figures(*ttft_ms):
    return {
        name: {"ttft_ms": ms, "ttft_p99_ms": 2 * ms, "reads": 8, "hits": 9}
        for name, ms in zip(("a", "b", "apart 1"), ttft_ms)
    }


@pytest.mark.nightly
def test_who_does_better_on_a_traffic_that_is_made_for_it_is_ahead():
    thrash = Traffic("thrash", {"adapter_mix": "thrash", "adapters": 60, "requests": 200})
    hotspot = Traffic("hotspot", {"adapter_mix": "hotspot", "rate": 80.0, "requests": 200})
    traffics = [thrash, hotspot]
    least = {traffic.name: bounds(traffic) for traffic in traffics}

    results = compete([ENGINES_OWN, known("affine"), known("hashing")], traffics, least)

    of = {}
    for traffic in traffics:
        alone = [replace(r, figures={traffic.name: r.figures[traffic.name]}) for r in results]
        of[traffic.name] = [row.name.removeprefix("ours: ") for row in board(alone, [traffic], least).rows]
    # Where adapters stay where they are, each of them is read once.
    assert of["thrash"].index("affine") < of["thrash"].index("the engine's own")
    # One engine cannot serve what nearly everybody wants.
    assert of["hotspot"].index("affine") < of["hotspot"].index("hashing")


def test_the_same_files_and_secret_give_the_same_page_and_picture(least):
    boards = [board(compete([ENGINES_OWN, known("LFU")], [TINY], least), [TINY], least) for _ in range(2)]

    assert page(boards[0]) == page(boards[1])
    assert picture(boards[0]) == picture(boards[1])


# What no policy beats.


def random_makers(rng):
    """Policies that say anything that is an answer."""

    class Anybody(FirstInFirstOut):
        def victim(self, candidates):
            return rng.choice(candidates)

    def admission(ranks):
        return lambda scheduler, output: rng.sample(list(scheduler.waiting), len(scheduler.waiting))

    def prefetch():
        return lambda waiting: [rng.randint(1, 12) for _ in range(rng.randint(0, 2))]

    def route(seed):
        return lambda adapter_id, engines: rng.randrange(len(engines))

    made = {"admission": admission, "eviction": Anybody, "prefetch": prefetch, "routing": route}
    return {kind: made[kind] for kind in rng.sample(sorted(made), rng.randint(1, 4))}


@pytest.mark.parametrize("seed", by_day(range(50), one_in=12))
def test_no_random_policies_beat_a_bound(seed):
    rng = random.Random(seed)
    mix, turns = rng.choice(sorted(league.ADAPTERS)), rng.choice((1.0, 3.0))
    trace, rate = rng.choice(league.TRACES), rng.choice((5.0, 500.0))
    options = {"adapter_mix": mix, "turns": turns, "trace": trace, "rate": rate, "seed": seed}
    traffic = Traffic("any", options | {"requests": 16, "adapters": 12})

    found, least = play(random_makers(rng), traffic.arrivals(), 12, seed), bounds(traffic)

    assert found["ttft_ms"] >= least["ttft_ms"]
    assert found["reads"] >= least["reads"]
    assert found["hits"] <= least["hits"]


@pytest.mark.parametrize("seed", by_day(range(6)))
def test_no_way_to_route_and_admit_a_few_requests_beats_the_bound(seed, monkeypatch):
    """Every way to send five requests to two engines, in every order of admission; nothing is to be read at all."""
    monkeypatch.setattr(league, "ENGINES", 2)
    free = replace(league.cost_model(), read_bytes_per_s=1e15)
    monkeypatch.setattr(league, "cost_model", lambda: free)
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 0.1) for _ in range(5))
    arrivals = [Arrival(t, rng.choice((40, 900, 5000)), 2, n % 2) for n, t in enumerate(times)]

    means = [
        play(
            {"routing": lambda s, to=to: in_turn(to), "admission": lambda r, by=by: by_order(by)},
            arrivals,
            2,
            0,
        )
        for to in itertools.product(range(2), repeat=4)
        for by in (range(5), range(4, -1, -1), rng.sample(range(5), 5))
        for to in [(0, *to)]
    ]

    best = min(found["ttft_ms"] for found in means)
    least = 1e3 * least_ttft(arrivals, free, 2, league.ROWS, league.TOKENS)
    assert least <= best <= 3 * least  # and it is no idle bound


# Arrivals, of how many adapters, the milliseconds that they take if a token takes one, and how near the bound is.
BY_TOKENS = {
    # Each fills a step: the tenth of an engine ends after ten, and not after forty.
    "forty prompts at once": (
        *([Arrival(0.0, league.TOKENS, 1, n % 4) for n in range(40)], 4),
        *(league.TOKENS * 5.5, 0.9),
    ),
    "what a session has said": (
        *([Arrival(0.0, 1600, 1, 0, session=3), Arrival(9.0, 3200, 1, 0, session=3)], 1),
        *(1600, 0.99),  # of each of the two: it need not be computed again
    ),
}


@pytest.mark.parametrize("what", BY_TOKENS)
def test_where_tokens_alone_cost_the_bound_is_near_what_engines_do(what, costs):
    arrivals, adapters, milliseconds, near = BY_TOKENS[what]
    cost = costs({"tokens": 1e-3})

    found = play({"routing": routing.POLICIES["affine"]}, arrivals, adapters, 0)["ttft_ms"]

    least = 1e3 * least_ttft(arrivals, cost, league.ENGINES, league.ROWS, league.TOKENS)
    assert found == pytest.approx(milliseconds, rel=1e-6)
    assert near * found < least <= found


def in_turn(numbers):
    left = iter(numbers)
    return lambda adapter_id, engines: next(left)


def by_order(places):
    def asked(scheduler, output):
        return sorted(scheduler.waiting, key=lambda request: places[int(1000 * request.arrival_time) % 5])

    return asked


@pytest.mark.parametrize("seed", range(10))
def test_the_least_flow_is_that_of_the_best_schedule(seed):
    """A machine that does a unit a second; all schedules by whole seconds."""
    rng = random.Random(seed)
    jobs = sorted((rng.randint(0, 4), rng.randint(1, 3)) for _ in range(4))

    assert least_flow(*zip(*jobs), 1.0) == pytest.approx(best_schedule(jobs))


def best_schedule(jobs, now=0, ended=0):
    """The least sum of flows by trying every job in every second."""
    if not jobs:
        return 0
    ready = [n for n, (came, _) in enumerate(jobs) if came <= now]
    if not ready:
        return best_schedule(jobs, now + 1)
    best = float("inf")
    for n in ready:
        came, left = jobs[n]
        others = jobs[:n] + jobs[n + 1 :]
        if left == 1:
            best = min(best, now + 1 - came + best_schedule(others, now + 1))
        else:
            best = min(best, best_schedule([*others[:n], (came, left - 1), *others[n:]], now + 1))
    return best


@pytest.mark.parametrize("seed", range(10))
def test_no_split_of_a_prompt_into_steps_takes_less(seed):
    rng = random.Random(seed)
    floor = sorted(rng.uniform(1, 9) for _ in range(5))

    assert least_alone(floor, 9)[9] == pytest.approx(
        min(sum(floor[n] for n in split) for split in splits(9, 4))
    )


def splits(tokens, most):
    if not tokens:
        return [()]
    return [(n, *rest) for n in range(1, min(tokens, most) + 1) for rest in splits(tokens - n, most)]


def test_a_step_of_more_tokens_is_never_bound_to_take_less():
    floor = step_floor(league.cost_model(), league.ROWS, league.TOKENS)

    assert (np.diff(floor) >= 0).all() and floor[1] > 0


# Submissions that are wrong.

WRONG = {
    "raises": ("def routing(seed):\n    raise KeyError(seed)\n", "KeyError: 709 (line 2)"),
    "no_number": ("routing = lambda seed: lambda *_: 'x'\n", "routing gave 'x', and engines are 0 to 3"),
    "behind": ("routing = lambda seed: lambda *_: -1\n", "routing gave -1, and engines are 0 to 3"),
    "victim": (
        "class eviction:\n    def __init__(self, cost): pass\n    used = left = victim = lambda *_: 999\n",
        "victim() gave 999, which is none of the candidates",
    ),
    "order": (
        "admission = lambda ranks: lambda *_: [3]\n",
        "admission gave 3, which is no request that waits",
    ),
    "ahead": ("prefetch = lambda: lambda waiting: [41]\n", "prefetch gave 41, and adapters are 1 to 40"),
    "empty": ("x = 1\n", "it defines none of admission, eviction, prefetch, routing"),
    "no_python": ("def routing(:\n", "SyntaxError: invalid syntax"),
    "exits": ("raise SystemExit\n", "its process ended before it had played"),
    "nobody": ("admission = lambda ranks: lambda *_: []\n", "none of which can run"),
}
ENDLESS = "def routing(seed):\n    while True:\n        pass\n"


def submitted(folder: Path, texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return [of_file(path) for path in sorted(folder.glob("*.py"))]


def test_who_is_wrong_is_told_by_name_and_loses_only_itself(tmp_path, least, monkeypatch):
    texts = {name: text for name, (text, _) in WRONG.items()} | {"right": ROUTES_LIKE_US}

    results = compete(submitted(tmp_path / "files", texts), [TINY], least)
    [own] = compete([ENGINES_OWN], [TINY], least)
    monkeypatch.setattr(league_compete, "LIMIT", 1.0)
    [endless] = compete(submitted(tmp_path / "endless", {"endless": ENDLESS}), [TINY], least)

    why = {result.name: result.why for result in results}
    assert why.pop("right") == ""
    assert endless.why == "no end after 1 s of computing, on 'tiny'"
    for name, (_, said) in WRONG.items():
        assert said in why[name], name
    [right] = [result for result in results if result.name == "right"]
    assert right.figures == own.figures
    found = board([own, endless, *results], [TINY], least)
    assert [row.name for row in found.rows] == [own.name, "right"]
    assert found.out.keys() == WRONG.keys() | {"endless"}


def test_who_is_faster_than_can_be_is_out():
    [result] = compete([ENGINES_OWN], [TINY], {"tiny": {"ttft_ms": 1e6}})

    assert result.why == "it is faster than can be: read its code"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\n", "the import of os is nothing"),
        ("from minivllm.commands.simulate import arrivals_of\n", "the import of minivllm.commands.simulate"),
        ("import minivllm.simulate.traffic\n", "the import of minivllm.simulate.traffic"),
        ("x = open('/etc/passwd')\n", "open is nothing that an answer may use"),
        ("from minivllm.policies import keeping\nkeeping.hits = 1\n", "a change of keeping"),
    ],
)
def test_a_submission_that_reaches_for_more_is_refused_before_it_runs(tmp_path, text, said):
    (tmp_path / "mallory.py").write_text(text + ROUTES_LIKE_US)
    [entrant] = read_submissions(tmp_path)

    with pytest.raises(LabError, match=said):
        entrant.make()


def test_submissions_are_confined(tmp_path, least):
    (tmp_path / "right.py").write_text(ROUTES_LIKE_US)
    [entrant] = read_submissions(tmp_path)
    outside = tmp_path / "outside"
    writes = Entrant("writes", lambda: outside.write_text("x"))

    right, wrong = compete([entrant, writes], [TINY], least, are_foreign=True)

    assert right.why == ""
    assert wrong.why.startswith("PermissionError")
    assert not outside.exists()


# Traffics that are kept apart.


def test_a_secret_gives_two_traffics_that_another_does_not():
    assert apart(SECRET) == apart(SECRET)
    assert apart(SECRET) != apart(SECRET + ".")
    assert len({traffic.given["adapter_mix"] for traffic in apart(SECRET)}) == 2
    with pytest.raises(LabError, match="a secret of 5 characters can be guessed"):
        apart("12345")


def test_what_learners_see_holds_nothing_of_traffics_that_are_kept_apart(tmp_path):
    """Neither kinds nor times, nor what an error says that was raised on one; the host's numbers hold all."""
    hidden = [replace(traffic, options=traffic.options | {"requests": 30}) for traffic in apart(SECRET)]
    traffics = [TINY, *hidden]
    least = {traffic.name: bounds(traffic) for traffic in traffics}
    seed = hidden[0].given["seed"]
    raises = "def routing(seed):\n    if seed != 709:\n        raise ValueError(f'seed {seed}')\n"
    tells = f"{ROUTES_LIKE_US}{raises}    return least_loaded\n"

    results = compete([ENGINES_OWN, *submitted(tmp_path, {"tells": tells})], traffics, least)
    found = board(results, traffics, least)
    host = json.dumps(everything(results, traffics, least, found))

    own = results[0].figures["apart 1"]
    assert found.out == {"tells": "fails on a traffic that is kept apart"}
    for secret in (str(seed), "apart 1", f"{own['ttft_ms']:,.0f} |"):
        assert secret not in page(found) + json.dumps(found)
    assert f"seed {seed}" in host and str(own["ttft_ms"]) in host
    assert found.rows[0].apart == 1.0


def test_names_and_messages_are_not_taken_for_markdown():
    traffics, least = [Traffic("a", {})], {"a": bound(1, 1)}
    own = {"a": figures(3)["a"]}
    results = [Result("own", own), Result("<b>|x", own), Result("y", {}, "a\n| b |")]

    text = page(board(results, traffics, least))

    assert "\\<b\\>\\|x" in text and "a \\| b \\|" in text


def test_fifo_lets_the_first_go_however_often_it_was_used():
    policy = FirstInFirstOut(lambda key: 1.0)
    for key in (1, 2, 3, 1):
        policy.used(key)

    assert policy.victim([2, 3, 1]) == 1
    policy.left(1)
    policy.used(1)
    assert policy.victim([3, 1, 2]) == 2


# Exercises, and the command.


@pytest.mark.parametrize(
    ("number", "like"),
    [
        ("10.2", "GDSF"),
        pytest.param("10.3", "fair", marks=pytest.mark.nightly),
        pytest.param("10.4", "queue", marks=pytest.mark.nightly),
    ],
)
def test_an_exercise_plays_as_the_policy_that_it_is(number, like, least, monkeypatch):
    exercise = read_engine()[number]
    texts = {"solved": exercise.text, "todo": exercise.fresh}
    entrants = []
    for name, text in texts.items():
        monkeypatch.setattr(
            league_entrants, "learners_sources", lambda n, text=text: {"m": Source("/x.py", text)}
        )
        entrants.append(replace(of_exercise(number), name=name))

    solved, todo, ours = compete([*entrants, known(like)], [TINY], least)

    assert solved.figures == ours.figures != {}
    assert f"lab {number}: " in todo.why and todo.why.endswith("is still TODO")


@pytest.fixture
def small_league(monkeypatch):
    monkeypatch.setattr(league, "OPEN_TRAFFICS", (TINY,))
    monkeypatch.setattr(league, "USUAL", league.USUAL | {"requests": 30})
    monkeypatch.setattr(league_entrants, "OURS", [ENGINES_OWN, known("FIFO")])


def lab(*arguments):
    return CliRunner().invoke(app, ["league", *map(str, arguments)])


def test_a_learner_gets_a_table_a_page_and_a_picture(tmp_path, small_league):
    (tmp_path / "mine.py").write_text(ROUTES_LIKE_US)

    done = lab(tmp_path / "mine.py", "--out", tmp_path / "out")

    assert done.exit_code == 0
    for name in ("mine", "ours: FIFO", "ours: the engine's own", "no policy beats"):
        assert name in done.stdout
    assert "| mine | 1.00 |" in (tmp_path / "out" / "league.md").read_text()
    assert (tmp_path / "out" / "league.png").read_bytes().startswith(b"\x89PNG")


def test_a_host_plays_all_files_of_a_folder_and_two_traffics_more(tmp_path, small_league):
    folder, secret = tmp_path / "handed-in", tmp_path / "secret"
    folder.mkdir()
    (folder / "alice.py").write_text(ROUTES_LIKE_US)
    (folder / "bob.py").write_text("import os\n")
    secret.write_text(SECRET + "\n")

    done = lab("--submissions", folder, "--secret", secret, "--out", tmp_path / "out", "--json")

    host, public = json.loads(done.stdout), (tmp_path / "out" / "league.md").read_text()
    assert [t["name"] for t in host["traffics"]] == ["tiny", "apart 1", "apart 2"]
    by_name = {entrant["name"]: entrant for entrant in host["entrants"]}
    assert by_name["alice"]["figures"].keys() == {"tiny", "apart 1", "apart 2"}
    assert by_name["bob"]["why"] == "bob.py:1: the import of os is nothing that an answer may use"
    assert "| alice | 1.00 | 1.00 |" in public and "bob" in public
    assert "apart 1" not in public


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere.py"], "there is no /nowhere.py"),
        (["--submissions", "."], "a host gives both"),
        (["--submissions", "/nowhere", "--secret", __file__], "/nowhere holds no submissions"),
    ],
)
def test_what_cannot_be_played_is_said_in_a_sentence(arguments, said):
    done = lab(*arguments)

    assert isinstance(done.exception, LabError)
    assert said in str(done.exception)
