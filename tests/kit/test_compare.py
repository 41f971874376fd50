"""`lab compare`: two engines' steps side by side, and the first that differs named with its reason."""

import copy
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from checkout import Checkout, asked_for
from recorded_runs import ONE_BY_ONE, TWO_BESIDE, VARIANT, run_all, write_program

from labs.kit.alignment import ALMOST, GAP, align, differences, distance
from labs.kit.commands.run import Told
from labs.kit.compare import Recorded, compare, record, steps_in
from labs.kit.mutants import mutants_of
from labs.kit.regions import ROOT, LabError, read_engine
from tests.tools.browser import Tab, open_browser
from tests.tools.nights import by_day
from tests.worlds.engines import tiny_world
from tests.worlds.waiting import wait_until

# Mutant, its exercise, and what the first step that differs is said to have: the first words, and something further on.
MUTANTS = {
    "one_victim_for_both_tiers": ("5.4", "memory: yours drops", "adapters in memory in yours"),
    "evicts_with_room_to_spare": ("5.4", "errors: r2 in yours", "All items are pinned or in use"),
    "base_waits_for_a_slot": ("6.1", "rows: ours computes", "(base model): max_loras; ours does not"),
    "the_shrink_of_the_first_slice_for_all": ("3.6", "logits: those of r0", "tokens: r0 gets"),
    "a_waiter_blocks_those_behind_it": ("6.2", "rows: ours computes", "(base model), yours nothing of it"),
    "adapters_share_a_key": ("6.5", "logits: those of", "are alike"),
}
OF_THE_PAGE, OF_ADAPTERS_ALONE = "one_victim_for_both_tiers", "the_shrink_of_the_first_slice_for_all"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    world = tiny_world(tmp_path_factory, VARIANT)
    return write_program(tmp_path_factory.mktemp("compare") / "serve.py", world.folder)


@pytest.fixture(scope="module")
def recorded(program, request):
    """Our engine twice, and once with each mistake that this run's tests are about."""
    jobs = {"ours": {}, "again": {}}
    for name in {OF_THE_PAGE, OF_ADAPTERS_ALONE} | (asked_for(request) & MUTANTS.keys()):
        jobs[name] = mutant_of(name).sources()
    return run_all(jobs, program, program.parent)


def mutant_of(name):
    [mutant] = [m for m in mutants_of(read_engine()[MUTANTS[name][0]]) if m.name == name]
    return mutant


@pytest.fixture
def steps(recorded):
    return copy.deepcopy(recorded["ours"].steps)


def first_that_differs(yours: list[dict], ours: list[dict]) -> int:
    """By looking at every field."""
    for index, (mine, theirs) in enumerate(zip(yours, ours)):
        for name in theirs.keys() - {"time_s", "logits"}:
            if mine[name] != theirs[name]:
                return index
        for request, probe in theirs["logits"].items():
            other = mine["logits"].get(request, {"values": []})["values"]
            if len(other) != len(probe["values"]):
                return index
            if not all(math.isclose(a, b, abs_tol=1e-2) for a, b in zip(other, probe["values"])):
                return index
    return min(len(yours), len(ours))


def test_the_program_gives_an_engine_something_to_do(recorded):
    steps = recorded["ours"].steps

    assert len(steps) > 20 and recorded["ours"].end is None
    assert all(any(step[name] for step in steps) for name in ("evictions", "skipped", "loads", "drops"))
    assert {row["kind"] for step in steps for row in step["rows"]} == {"prefill", "chunk", "decode"}
    sampled = [set(step["tokens"]) for step in steps]
    assert all(set(step["logits"]) == tokens for step, tokens in zip(steps, sampled))


def test_the_same_engine_twice_is_alike(recorded):
    found = compare(recorded["again"], recorded["ours"])

    assert found.column is None and found.reasons == [] and found.differing == []
    steps = len(recorded["ours"].steps)
    assert found.pairs == [(i, i) for i in range(steps)]
    assert found.verdict.startswith(f"Your engine does what ours does in all {steps} steps")


@pytest.mark.parametrize("name", by_day(MUTANTS))
def test_a_mistake_is_found_in_the_step_where_it_begins(recorded, name):
    _, first, further = MUTANTS[name]

    found = compare(recorded[name], recorded["ours"])

    assert found.column == first_that_differs(recorded[name].steps, recorded["ours"].steps)
    assert found.reasons[0].startswith(first), found.reasons
    assert any(further in reason for reason in found.reasons), found.reasons
    assert f"Step {found.column} is the first that differs" in found.verdict


def test_base_rows_are_alike_where_only_adapters_are_wrong(recorded):
    found = compare(recorded[OF_ADAPTERS_ALONE], recorded["ours"])

    with_adapters = [step for step in recorded["ours"].steps if any(row["adapter"] for row in step["rows"])]
    assert found.column == with_adapters[0]["step"]
    assert all(reason.startswith(("logits:", "tokens:")) for reason in found.reasons)


def change(steps, index, **fields):
    steps[index] |= fields
    return steps


def said(yours, ours):
    return compare(Recorded("yours", yours), Recorded("ours", ours)).reasons


def test_each_kind_of_difference_is_said(steps, recorded):
    ours = recorded["ours"].steps
    first = ours[5]["rows"][0]
    row, name = {**first}, first["request"]
    cases = {
        f"rows: of {name}": {"rows": [{**row, "tokens": 99}, *ours[5]["rows"][1:]]},
        f"rows: {name} has adapter 'other' in yours": {
            "rows": [{**row, "adapter": "other"}, *ours[5]["rows"][1:]]
        },
        "rows: yours finds 7 tokens": {"rows": [{**row, "cached": 7}, *ours[5]["rows"][1:]]},
        "rows: their order is": {"rows": ours[5]["rows"][::-1]},
        "queue: there wait nobody, ever in yours": {"waiting": ["nobody", "ever"]},
        "preemptions: yours preempts r0, ours nothing": {"preempted": ["r0"]},
        "loads: yours reads x, ours": {"loads": ["x"]},
        "slots: there are 0 in yours, 2 in ours": {"slots": []},
        "pins: yours has pinned x, ours nothing": {"pinned": ["x"]},
        "memory: 99 adapters in memory in yours": {"in_memory": 99},
        f"tokens: {name} gets none in yours": {
            "tokens": {request: token for request, token in ours[5]["tokens"].items() if request != name}
        },
        "errors: r0 in yours: broken; in ours: does not fail": {"errors": {"r0": "broken"}},
        "errors: yours raises KeyError: 3; ours nothing": {"error": "KeyError: 3"},
    }

    for sentence, fields in cases.items():
        found = said(change(copy.deepcopy(ours), 5, **fields), ours)
        assert found[0].startswith(sentence), (sentence, found)


def test_of_a_step_that_broke_off_only_the_error_is_told(steps, recorded):
    broken = {"rows": [], "slots": [], "tokens": {}, "logits": {}, "error": "Todo: lab 6.2: skip"}

    found = said(change(steps, 3, **broken)[:4], recorded["ours"].steps)

    assert found == ["errors: yours raises Todo: lab 6.2: skip; ours nothing"]


def test_an_engine_that_stops_early_is_said_to(recorded):
    ours = recorded["ours"]
    yours = Recorded("yours", ours.steps[:7], end="it had not ended after 60 s")

    found = compare(yours, ours)

    assert found.column == 7
    assert found.reasons == ["yours takes no further step: it had not ended after 60 s"]


def test_logits_may_differ_by_the_order_of_a_sum_and_no_more(steps, recorded):
    ours = recorded["ours"].steps
    [request, probe] = next(iter(steps[4]["logits"].items()))

    probe["values"] = [value + 1e-6 for value in probe["values"]]
    assert said(steps, ours) == []
    probe["values"][-1] += 0.5
    assert said(steps, ours)[0].startswith(f"logits: those of {request}")
    probe["values"][-1] = math.nan
    assert said(steps, ours)[0].endswith("nan in yours")


def test_many_differences_of_one_kind_are_counted(steps, recorded):
    rows = [
        {**row, "tokens": row["tokens"] + 1, "request": f"other-{i}"}
        for i, row in enumerate(steps[9]["rows"] * 2)
    ]

    found = said(change(steps, 9, rows=rows), recorded["ours"].steps)

    wrong = len(rows) + len(recorded["ours"].steps[9]["rows"])
    assert sum(sentence.startswith("rows: ") for sentence in found) == 5
    assert f"rows: and {wrong - 4} more" in found


def test_an_engine_of_ours_that_does_nothing_is_nothing_to_compare_with():
    with pytest.raises(LabError, match="makes our engine take no step"):
        compare(Recorded("yours"), Recorded("ours"))


@pytest.mark.parametrize(("every", "lines"), [(10, [0, 10, 11, 21]), (0, [*range(25)])])
def test_how_far_it_is_is_said_at_once_and_then_now_and_then(every, lines):
    times, said = iter(range(25)), []
    tell = Told(said.append, every, clock=lambda: next(times))

    for second in range(25):
        tell("our engine runs" if second < 11 else "your engine runs", f"second {second}")

    assert [int(re.search(r"second (\d+)", line)[1]) for line in said] == lines
    assert said[0] == "[dim]our engine runs: second 0[/]"


def letter(name: str) -> dict:
    """A step with two rows, one of them by its name."""
    rows = [
        {"request": request, "adapter": None, "slot": None, "tokens": 1, "kind": "decode", "cached": 0}
        for request in (name[0], "x" + name[1:])
    ]
    lists = (
        *("slots", "pinned", "loads", "activations", "evictions"),
        *("skipped", "preempted", "waiting", "drops"),
    )
    return {"rows": rows, "in_memory": 0, "kv_blocks": 0, **{key: [] for key in lists}}


def least_cost(yours: list[dict], ours: list[dict]) -> float:
    """Of all ways to put the two side by side whose first steps that differ are a pair, each tried."""
    both = list(zip(yours, ours))
    start = next((i + 1 for i, (a, b) in enumerate(both) if a != b), len(both))
    begun = sum(distance(a, b) for a, b in both[:start])

    @cache
    def rest(i: int, j: int) -> float:
        if i == len(yours) or j == len(ours):
            return (len(yours) - i + len(ours) - j) * GAP
        beside = distance(yours[i], ours[j]) + rest(i + 1, j + 1)
        return min(beside, GAP + rest(i + 1, j), GAP + rest(i, j + 1))

    return begun + rest(start, start)


def test_steps_are_aligned_as_cheaply_as_can_be():
    draw = random.Random(4)
    for _ in range(300):
        words = [["".join(draw.choices("ab", k=2)) for _ in range(draw.randrange(7))] for _ in range(2)]
        yours, ours = [[letter(name) for name in word] for word in words]

        pairs = align(yours, ours)

        assert [i for i, _ in pairs if i is not None] == list(range(len(yours)))
        assert [j for _, j in pairs if j is not None] == list(range(len(ours)))
        cost = sum(GAP if None in pair else distance(yours[pair[0]], ours[pair[1]]) for pair in pairs)
        assert cost == pytest.approx(least_cost(yours, ours)), words


def test_distances_tell_equal_from_almost_equal(steps, recorded):
    ours = recorded["ours"].steps

    assert distance(steps[3], ours[3]) == 0
    assert distance(change(steps, 3, in_memory=9)[3], ours[3]) == ALMOST
    assert distance(letter("ab"), letter("cd")) == 1
    assert not differences(steps[4], ours[4])


def test_the_page_shows_both_and_goes_to_the_difference(recorded, tmp_path):
    found = compare(recorded[OF_THE_PAGE], recorded["ours"])

    with open_browser() as browser:
        tab = Tab(browser, width=400).open(found.page("serve.py"), tmp_path)

        assert tab.page.evaluate("page.column") == found.column
        assert tab.page.evaluate("[...page.trace.differs]") == found.differing
        assert found.reasons[0] in tab.page.inner_text("#verdict")
        heads = tab.page.locator("#details h2").all_inner_texts()
        assert heads == [f"One_victim_for_both_tiers, step {found.column}", f"Ours, step {found.column}"]
        [dropped] = recorded[OF_THE_PAGE].steps[found.column]["drops"]
        marked = tab.page.locator("#details li.odd").all_inner_texts()
        assert [line.replace("\n", "") for line in marked] == [f"{dropped} left memory for another"]
        step = recorded["ours"].steps[found.column]
        cells = tab.page.locator("#details .sides > div").last.locator("tr td:last-child").all_inner_texts()
        assert cells == [str(step["tokens"].get(row["request"], "")) for row in step["rows"]]
        tab.page.evaluate("page.go(0)")
        tab.page.locator("#verdict button").click()
        assert tab.page.evaluate("page.column") == found.column
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 400
        assert tab.troubles == []


@pytest.fixture
def run_program(tmp_path_factory):
    """Record one of `recorded_runs`, as it does with these options."""
    world, folder = tiny_world(tmp_path_factory, VARIANT), tmp_path_factory.mktemp("recorded")

    def run_program(name, text, **options):
        program = write_program(folder / f"{name}.py", world.folder, text, **options)
        return record(name, ["python", str(program)], dict(os.environ), folder)

    return run_program


@pytest.mark.nightly
def test_an_engine_in_a_process_of_its_own_is_recorded_like_one_in_a_thread(run_program):
    thread = run_program("thread", ONE_BY_ONE, in_a_process=False)
    process = run_program("process", ONE_BY_ONE, in_a_process=True)

    assert len(thread.steps) >= 8 and thread.end is None
    assert any(step["logits"] for step in process.steps)
    assert compare(process, thread).reasons == []


@pytest.mark.nightly
def test_of_two_engines_in_processes_the_first_that_steps_is_recorded(run_program):
    for _ in range(2):  # what an earlier recording left is no hindrance
        alone = run_program("alone", TWO_BESIDE, number=1)
        beside = run_program("beside", TWO_BESIDE, number=2)

    assert {request for step in beside.steps for request in step["tokens"]} == {"first"}
    assert len(alone.steps) >= 30 and beside.end is None
    assert compare(beside, alone).reasons == []


def test_the_steps_that_are_told_of_while_it_runs_come_to_those_of_the_verdict(program, recorded):
    file = program.parent / "ours.jsonl"
    lines = file.read_text().splitlines(keepends=True)

    assert (
        steps_in(file) == len(recorded["ours"].steps) == len(lines) - 2
    )  # the first has the room, the last the end
    cut = file.with_name("cut.jsonl")
    for number in range(3):
        cut.write_text("".join(lines[:number]) + '{"step": ')
        assert steps_in(cut) == max(0, number - 1)
    assert steps_in(file.with_name("nothing.jsonl")) == 0


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.nightly
def test_the_command_compares_a_learners_code(program, checkout):
    checkout.answer("6.1", *mutant_of("base_waits_for_a_slot").edits)
    out = checkout.root / "compared"

    result = checkout.lab("compare", "--labs", "6.1", "--folder", str(out), "--", "python", str(program))

    assert result.returncode == 1, result.stderr
    assert "yours: 6.1\n" in result.stdout
    assert "Of yours 6.1 did not pass as it is now" in result.stdout  # it was never checked
    assert " is the first that differs, of " in result.stdout
    assert "\n  rows: ours computes" in result.stdout
    html = (out / "compare.html").read_text("utf-8")
    assert "base_waits_for_a_slot" not in html and '"verdict":"Step ' in html
    assert len([json.loads(line) for line in (out / "ours.jsonl").read_text().splitlines()]) > 20


@pytest.mark.nightly
def test_the_command_says_what_cannot_be_compared(program, checkout):
    nothing = checkout.lab("compare", "--", "python", str(program))
    shell = checkout.lab("compare", "--labs", "6.1", "--", "ls")
    todo = checkout.lab("compare", "--labs", "6.2", "--", "python", str(program))

    assert nothing.returncode == 2 and "nothing is yours yet" in nothing.stderr
    assert shell.returncode == 2 and "'ls' is no Python program" in shell.stderr
    assert todo.returncode == 1 and "errors: yours raises Todo: lab 6.2" in todo.stdout


ENDLESS = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)\n"


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_program_ends_with_the_command_that_runs_it(tmp_path, number):
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = ["compare", "--labs", "6.1", "--folder", str(tmp_path / "out"), "--", "python", "endless.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "labs.kit.cli", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = tmp_path / "out/ours.out"
    wait_until(lambda: printed.is_file() and printed.read_text())

    process.send_signal(number)
    said = process.communicate()[0]

    assert "our engine runs: 0 steps, 0 s" in said
    program = int(printed.read_text())
    wait_until(lambda: not Path(f"/proc/{program}").exists())
