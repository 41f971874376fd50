"""The `lab` command, as a learner and an instructor use it."""

import json
import re
import subprocess
import time
from xml.etree import ElementTree

import pytest
from checkout import Checkout

from labs.kit.commands.check import say_what_is_next
from labs.kit.commands.overview import say_next
from labs.kit.hunt import read_hunts
from labs.kit.path import next_of, track_of
from labs.kit.progress import Progress
from labs.kit.regions import ROOT, read_engine

# A classic: the base row's -1 taken as an index.
LAST_SLOT = ("if slot >= 0:", "if slot >= -1:")
MUTANTS = """
[[mutant]]
name = "first_slot_is_none"
misconception = "Slot 0 is a slot like any other."
old = "if slot >= 0:"
new = "if slot > 0:"

[[mutant]]
name = "last_slot_for_base_rows"
misconception = "Slot -1 means no adapter; as an index it is the last slot."
old = "if slot >= 0:"
new = "if slot >= -1:"
"""
HINTS = """
["3.2"]
minutes = 15
hints = ["a nudge", "the approach", '''
for token, slot in ...:
    y = A @ x'''
]

["3.3"]
track = "side"
minutes = 15
hints = ["a nudge", "the approach", "pseudocode"]
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("lab"))
    mutants = checkout.root / "labs/03_cpu_punica/mutants/3.2.toml"
    mutants.parent.mkdir(exist_ok=True)
    mutants.write_text(MUTANTS)
    (checkout.root / "labs/03_cpu_punica/hints.toml").write_text(HINTS)
    checkout.generate()
    return checkout


@pytest.fixture
def checkout(shared):
    shared.forget()
    return shared


def test_a_pass_names_the_next_exercise_and_says_when_a_phase_is_done(capsys):
    class Solved(Progress):
        def __init__(self, *numbers):
            self.passed = dict.fromkeys(numbers, "")

        def state(self, exercise):
            return "passed" if exercise.number in self.passed else "todo"

    exercises = read_engine()
    core = ["1.2", "1.3", "1.4", "1.5", "1.6"]

    say_what_is_next([exercises["1.3"]], Solved("1.2", "1.3"))
    amid = capsys.readouterr().out
    say_what_is_next([exercises["1.6"]], Solved(*core))
    at_the_end = capsys.readouterr().out

    assert amid == "Next: lab 1.4, fold the scaling into B, once, about 10 minutes\n"
    assert at_the_end.startswith(
        "Phase 01 is done, and its side tracks are yours to take or leave.\nNext: lab 2.1,"
    )


def test_the_path_says_of_each_phase_on_which_path_it_is(checkout):
    said = checkout.lab().stdout

    assert "\n03_cpu_punica  core path, 0 of 5\n" in said
    assert "\n04_triton_sgmv  kernel path, 0 of 4\n" in said


def test_several_exercises_may_be_named_and_a_phase_among_them(checkout):
    said = checkout.lab("check", "3.2", "1", "3.2").stdout

    assert said.startswith("Checking 3.2, 1, 3.2: ") and said.count("· 3.2 ") == 1
    assert "· 1.1 " in said and "· 1.6 " in said and "3.3 " not in said


def test_commands_of_instructors_and_maintainers_stand_apart_from_a_learners(checkout):
    learners, instructors, maintainers = re.split(
        "For instructors|For maintainers", checkout.lab("--help").stdout
    )

    assert " check " in learners
    assert re.findall(r"(?m)^│ (\w+)", instructors) == ["grade"]
    assert re.findall(r"(?m)^│ (\w+)", maintainers) == ["mutants", "variants", "sync"]


def test_the_first_line_comes_before_anything_slow(checkout):
    code = "import sys, labs.kit.cli\nprint([m for m in ('torch', 'pytest') if m in sys.modules])"

    assert checkout.run("-c", code).stdout == "[]\n"


def test_an_untouched_exercise_is_todo(checkout):
    result = checkout.lab("check", "3.2")

    assert result.returncode == 1
    place = checkout.place("3.2", "# region lab 3.2")
    assert f"· 3.2 shrink, one token at a time  TODO {place}\n" in result.stdout


def test_a_pass_of_one_exercise_is_shown_until_its_own_code_changes(checkout):
    refused, spoilt = checkout.lab("diff", "3.2"), checkout.lab("diff", "3.2", "--spoil")
    checkout.solve("1.1", "3.2")
    path = checkout.file("3.2")
    whole = path.read_text()
    path.write_text(whole.replace('raise Todo("lab 3.3', 'raise (Todo("lab 3.3'))  # which is no Python

    result = checkout.lab("check", "3.2")
    path.write_text(whole)
    passed, earned = checkout.lab().stdout, checkout.lab("diff", "3.2")
    path.write_text(whole.replace("shrunk = ", "shrunk = 2 * "))
    changed = checkout.lab().stdout

    assert result.returncode == 0 and "✓ 3.2 shrink, one token at a time" in result.stdout
    assert passed.startswith("1 of ") and "Next: lab 1.1" in passed
    for line in ("✓ 3.2 shrink, one token at a time\n", "~ 1.1 ", "· 3.3 "):
        assert f"\n  {line}" in passed
    assert "\n  ~ 3.2 shrink, one token at a time  changed since it passed\n" in changed
    assert changed.count("changed since it passed") == 1 and "since it passed" not in passed
    assert refused.returncode == 2 and "has not passed" in refused.stderr
    lines = [line.split() for line in spoilt.stdout.splitlines()]
    assert [">", "if", "slot", ">=", "0:"] in lines
    assert any(line[:3] == [">", "raise", 'Todo("lab'] for line in lines)
    assert earned.stdout.startswith("yours is ours, but for docstrings, comments and layout\n")


def test_of_a_phase_the_pages_are_listed_of_what_may_be_used(checkout):
    said = checkout.lab("api", "3").stdout.splitlines()

    assert [line.split("  ")[0] for line in said] == [f"lab api 3.{n}" for n in range(1, 7)]
    assert said[1] == "lab api 3.2  shrink, one token at a time"


def test_a_classic_mistake_is_recognised(checkout):
    checkout.answer("3.2", LAST_SLOT)

    result = checkout.lab("check", "3.2")

    assert result.returncode == 1
    assert "✗ 3.2" in result.stdout
    assert "It looks like this: Slot -1 means no adapter; as an index it is the last slot." in result.stdout
    assert "Slot 0 is a slot" not in result.stdout
    assert "lab debug" not in result.stdout, "the mistake is named"


def test_a_mistake_of_ones_own_is_not(checkout):
    checkout.answer("3.2", ("shrunk = ", "shrunk = 1.5 * "))

    result = checkout.lab("check", "3.2")

    assert "✗ 3.2" in result.stdout
    assert "It looks like this" not in result.stdout
    assert "comparing with 2 known mistakes\n" in result.stdout
    assert "It is none of the 2 known mistakes." in result.stdout
    assert "what your code prints is shown; lab debug 3.2 " in result.stdout, "nothing else helps"


@pytest.mark.nightly
def test_two_mistakes_at_once_are_both_recognised(checkout):
    checkout.answer(
        "7.1",
        ("ids.repeat(num_scheduled_tokens)", "ids"),
        ('        entries.sort(key=attrgetter("request.adapter_id"))\n', ""),
    )

    said = checkout.lab("check", "7.1").stdout

    named = [line for line in said.split("\n") if "looks like this" in line]
    assert any("One id a request is too few" in line for line in named)
    assert any("In the order of adapters the rows of one adapter are a run" in line for line in named)


@pytest.mark.nightly
def test_grades_are_told_in_the_order_of_the_exercises(checkout):
    checkout.solve("3.1", "3.4")
    checkout.answer("3.3", ("kept + expanded", "undefined"))  # which is compared with no known mistake

    said = checkout.lab("check", "3").stdout

    told = [line[2:5] for line in said.split("\n") if line[:1] in ("✓", "✗", "·")]
    assert told == ["3.1", "3.2", "3.3", "3.4", "3.5", "3.6"]


def test_what_is_solved_in_part_is_todo_for_the_grader_and_for_a_run(checkout):
    checkout.solve("2.2", "5.1")
    path = checkout.file("2.2")
    half = "        for i in range(len(self.a)):\n            self._clear_past(slot, i, 0)\n"
    assert half in path.read_text()
    path.write_text(path.read_text().replace(half, '        raise Todo("lab 2.2: the other half")\n'))

    checked = checkout.lab("check", "2.2").stdout
    ran = checkout.lab("run", "--", "python", "-c", "import os; print(os.environ['MINIVLLM_LABS'])").stdout

    assert f"· 2.2 write and clear a slot  TODO {checkout.place('2.2', '# region lab 2.2')}" in checked
    whose = "minivllm.lora.lru_cache is yours, labs/05_slot_manager/lru_cache.py; nothing left TODO"
    assert ran == f"yours: 5.1\nours: 2.2, of which a part is still TODO\n{whose}\n5.1\n"


@pytest.mark.nightly
def test_what_comes_next_is_on_the_learners_own_path(checkout):
    checkout.solve("1.6", "3.2")
    checkout.lab("check", "3.2")
    checkout.lab("check", "1.6")

    def proposed():
        return next(line for line in checkout.lab().stdout.split("\n") if line.startswith("Next: "))

    after_a_pass = proposed()
    checkout.solve("5.1")
    begun = proposed()
    checkout.lab("check", "5.1")

    assert after_a_pass.startswith("Next: lab 2.1,"), "1.6 passed last, and 1.7 is a side track"
    assert begun.startswith("Next: lab 5.1,"), "5.1 has been begun"
    assert proposed().startswith("Next: lab 5.2,"), "5.1 passed last, and what is solved is not proposed"


@pytest.mark.nightly
def test_side_tracks_of_a_phase_are_proposed_to_whoever_begins_one(checkout):
    checkout.solve("5.4")
    checkout.lab("check", "5.4")
    on_the_core_path = checkout.lab().stdout
    checkout.solve("5.3")
    checkout.lab("check", "5.3")
    checkout.lab("check", "5.4")

    said = checkout.lab().stdout

    assert "Next: lab 5.7," in on_the_core_path
    assert "✓ 5.3 a mapping counts only together with the slots it was made for  (side track)" in said
    assert "Next: lab 5.5, a pin holds a slot  (side track)" in said
    assert said.startswith(
        "1 of 26 on the core path, 0 of 4 on the kernel path, 0 of 6 on the serving path, "
        "0 of 5 on the policy path, 0 of 4 on the parallel path, 0 of 5 on the variant path, "
        "0 of 4 on the learning path, "
        "1 of 13 on side tracks "
    )


def test_what_has_changed_since_it_passed_is_to_be_checked_again(capsys):
    exercise = read_engine()["3.2"]

    say_next(exercise, has_changed=True)
    changed = capsys.readouterr().out
    say_next(exercise)

    assert re.search(
        r"\n  changed since it passed: labs/\S+:\d+\n  lab check 3.2 checks it again\n$", changed
    )
    assert "since it passed" not in capsys.readouterr().out


def test_after_the_core_path_nothing_is_proposed_that_was_not_begun():
    exercises = list(read_engine().values())
    done = {e.number: "passed" if track_of(e) == "core" else "todo" for e in exercises}
    kernels_begun = {**done, "4.1": "passed"}

    assert next_of(exercises, done, "7.4") is None
    assert next_of(exercises, kernels_begun, "7.4").number == "4.2"
    assert next_of(exercises, {**done, "3.2": "todo"}, "7.4").number == "3.2"


def test_the_end_of_the_core_path_says_what_else_there_is(capsys):
    say_next(None)

    said = capsys.readouterr().out
    assert said.startswith("The core path is done.")
    for way_on in (
        "lab run -- minivllm demo",
        "lab compare",
        "lab hunt",
        "lab check 4.1",
        "lab check 9.1",
        "lab check 10.1",
        "lab check 11.1",
    ):
        assert f"\n  {way_on} " in said
    for page in re.findall(r"\S+\.md", said):
        assert (ROOT / page).is_file()


@pytest.mark.nightly
def test_a_hint_is_offered_for_what_was_begun_and_for_no_untouched_side_track(checkout):
    checkout.solve("3.1", "3.2", "3.5", "3.6")
    checkout.answer("3.4", ("start = row", "start = row + 1"))

    failing = checkout.lab("check", "3")
    checkout.solve("3.4")
    solved = checkout.lab("check", "3")

    assert "stuck? lab hint 3.4\n" in failing.stdout
    assert "is done" not in failing.stdout
    assert failing.returncode == 1
    assert "core path: 5 passed, 0 failed, 0 TODO\nside tracks: 0 passed, 0 failed, 1 TODO\n" in solved.stdout
    assert "stuck?" not in solved.stdout
    assert "Phase 03 is done, and its side tracks are yours to take or leave.\n" in solved.stdout
    assert "\nNext: lab 5.1," in solved.stdout
    assert solved.returncode == 0
    assert "03_cpu_punica  core path, 5 of 5 ✓ done\n" in checkout.lab().stdout
    assert "stuck? lab hint 3.3\n" in checkout.lab("check", "3.3").stdout


def test_what_the_code_prints_is_shown_whether_it_passes_or_fails(checkout):
    checkout.answer("3.4", ("    runs: list", "    print('rows', len(token_slots))\n    runs: list"))
    passing = checkout.lab("check", "3.4").stdout
    checkout.forget()
    fails = "    print('rows', len(token_slots))\n    token_slots = token_slots and undefined\n    runs: list"
    checkout.answer("3.4", ("    runs: list", fails))

    failing = checkout.lab("check", "3.4").stdout

    assert "✓ 3.4" in passing
    assert "      printed: rows 0\n" in passing
    assert "✗ 3.4" in failing
    assert "      printed: rows 1\n" in failing
    assert "lab debug 3.4 stops at breakpoint() and where a test fails; lab api 3.4 shows" in failing


def test_a_debugger_stops_at_a_breakpoint_in_ones_code_and_where_a_test_fails(checkout):
    checkout.answer("3.4", ("    runs: list", "    breakpoint()\n    return 5\n    runs: list"))

    result = checkout.lab("debug", "3.4", stdin="p 6 * 7\nclear\ny\nc\np found\nq\n")

    assert "(Pdb) 42\n" in result.stdout
    assert "-> assert found == runs" in result.stdout
    assert "(Pdb) 5\n" in result.stdout
    assert result.returncode != 0


@pytest.mark.nightly
def test_whoever_waits_for_a_long_test_is_told_for_which(checkout):
    code = (
        "from labs.kit import forks\nfrom labs.kit.commands.check import say_wait\n"
        "from labs.kit.overlay import learners_sources\nforks.LONG = 0.5\n"
        "job = forks.Job(None, '3.2', learners_sources('3.2'))\n"
        "list(forks.run([job], limit=2, on_wait=say_wait))"
    )
    checkout.answer("3.2", ("for token,", "while True: pass\n    for token,"))

    said = checkout.execute(code).stdout

    assert re.fullmatch(
        r"3\.2 test_\S+ is still running: in \d+ s by the clock it has computed for [0-2] s\. All tests together may "
        r"compute for 10 s, or 20 times as long as on our code if that is more; time that other programs take from "
        r"them does not count\n",
        said,
    )


@pytest.fixture(scope="module")
def in_git(tmp_path_factory):
    """A checkout of its own, in git."""
    checkout = Checkout(tmp_path_factory.mktemp("committed"))
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *command], cwd=checkout.root, check=True)
    return checkout


@pytest.fixture
def committed(in_git):
    in_git.forget()
    subprocess.run(["git", "checkout", "-q", "minivllm"], cwd=in_git.root, check=True)
    return in_git


def test_code_of_ours_that_was_edited_is_named_and_commands_go_on(committed):
    path = committed.root / "minivllm/lora/mapping.py"
    committed.solve("3.5")
    quiet = committed.lab("hunt")
    path.write_text(path.read_text().replace("    return runs\n", "    return runs[:1]\n"))

    said = [committed.lab(*command) for command in ([], ["hunt"], ["hunt", "17"], ["check", "3.5"])]

    assert quiet.stderr == ""
    for result in said:
        assert result.stderr.startswith(
            "minivllm/lora/mapping.py is not as in git. Answers belong into labs/, "
        )
        assert result.stderr.count("\n") == 1
    assert [result.returncode for result in said] == [0, 0, 0, 0], said[0].stderr
    assert "Next: lab " in said[0].stdout
    assert " 8.28 " in said[1].stdout


def test_code_of_ours_that_python_cannot_read_is_named_and_commands_go_on(committed):
    path = committed.root / "minivllm/lora/mapping.py"
    path.write_text(path.read_text().replace("    return runs\n", "    return runs[\n"))
    line = 1 + path.read_text().split("\n").index("    return runs[")

    said = [committed.lab(*command) for command in ([], ["hunt"], ["hunt", "17"], ["check", "3"])]
    from_doctor = committed.execute(
        "from labs.kit.doctor import _engine\nfound = _engine()\nprint(found.is_good, found.text)"
    )

    for result in said:
        assert result.stderr.startswith(
            f"minivllm/lora/mapping.py:{line}: '[' was never closed. It is our code, "
        )
        assert result.stderr.count("\n") == 1
    assert [result.returncode for result in said] == [0, 0, 0, 1]
    assert "Next: lab 0.1" in said[0].stdout
    assert (
        "core path: 0 passed, 0 failed, 5 TODO\nside tracks: 0 passed, 0 failed, 1 TODO\n" in said[3].stdout
    )
    assert from_doctor.stdout.startswith(f"False minivllm/lora/mapping.py:{line}: ")


def test_a_name_that_is_not_there_is_no_known_mistake_and_its_trace_is_shown_when_it_is_asked_for(checkout):
    checkout.answer("3.2", ("shrunk = ", "shrunk = undefined * "))

    short, long = checkout.lab("check", "3.2").stdout, checkout.lab("check", "3.2", "--trace").stdout

    place = checkout.place("3.2", "undefined")
    assert f"NameError: name 'undefined' is not defined\n      your code: {place}" in short
    assert "known mistake" not in short
    assert ">               shrunk = undefined" not in short
    assert ">               shrunk = undefined" in long


def test_a_crash_is_an_answer_too(checkout):
    checkout.answer("3.2", ("shrunk = ", "import os; os.abort(); shrunk = "))

    result = checkout.lab("check", "3.2")

    assert re.search(r"the tests' process ended before they did, in test_\w+", result.stdout)


def test_an_exercise_is_graded_by_the_tests_that_carry_its_mark(checkout):
    test = "@pytest.mark.lab('3.2')\ndef test_{}(): pass\n"
    text = (
        'import pytest\n# mark.lab("3.2")\n' + test.format("own") + test.format("other").replace("3.2", "3.3")
    )
    (checkout.root / "tests/phase_03/test_marks.py").write_text(text + "def test_nobodys(): pass\n")
    code = (
        "from labs.kit.forks import Job, run\n"
        "[(_, outcome)] = run([Job(None, '3.2', {})])\n"
        "print([r.test.partition('::')[2] for r in outcome.results if 'test_marks' in r.test])"
    )

    assert checkout.execute(code).stdout == "['test_own']\n"


def test_hints_come_one_after_another_and_the_last_stays(checkout):
    said = [checkout.lab("hint", "3.2").stdout.split("\n", 1) for _ in range(4)]

    assert [head.split(",")[0] for head, _ in said] == [f"Hint {n} of 3" for n in (1, 2, 3, 3)]
    assert [text for _, text in said[:2]] == ["a nudge\n", "the approach\n"]
    assert said[2][1] == said[3][1] == "for token, slot in ...:\n    y = A @ x\n"


def test_a_hint_for_no_number_is_for_where_one_is(checkout):
    for number in ("0.1", "1.2"):
        checkout.solve(number)
    at_the_start = checkout.lab("hint").stdout
    checkout.lab("check", "3.2")  # a stub
    checked = [checkout.lab("hint").stdout for _ in range(2)]
    checkout.lab("check", "0.1", "1.2")
    after_a_pass = checkout.lab("hint").stdout

    assert at_the_start.startswith("lab 0.1, which you have begun\nHint 1 of 3, lab 0.1: ")
    assert [said.split("\n", 2)[:2] for said in checked] == [
        ["lab 3.2, which you checked last", f"Hint {n} of 3, lab 3.2: shrink, one token at a time"]
        for n in (1, 2)
    ]
    assert after_a_pass.startswith("lab 1.3, which is next on your path\nHint 1 of 3, lab 1.3: ")


def test_a_hint_for_no_number_may_be_a_hunts(checkout):
    file = read_hunts(checkout.root)["8.17"].test_file
    starter = file.read_text()
    checkout.lab("hunt", "17", "--check")
    untouched = checkout.lab("hint").stdout
    file.write_text("def test_hunt_17():\n    assert True\n")
    checkout.lab("hunt", "17", "--check")

    said = checkout.lab("hint").stdout
    file.write_text(starter)

    assert untouched.startswith("lab 8.17, which you checked last\nHint 1 of 3, hunt 8.17: ")
    assert said.startswith("lab 8.17, which you checked last\nHint 2 of 3, hunt 8.17: ")


def test_reset_puts_back_one_stub_and_keeps_what_was_there(checkout):
    fresh = checkout.file("3.2").read_text()
    checkout.solve("3.3")
    with_one = checkout.file("3.2").read_text()
    checkout.solve("3.2")
    with_both = checkout.file("3.2").read_text()

    assert checkout.lab("reset", "3.2", stdin="n\n").returncode == 1
    assert checkout.file("3.2").read_text() == with_both

    result = checkout.lab("reset", "3.2", stdin="y\n")
    assert checkout.file("3.2").read_text() == with_one
    [kept] = result.stdout.strip().split("kept: ")[1:]
    assert (checkout.root / kept).read_text() == with_both

    checkout.lab("reset", "3", "--yes")
    assert checkout.file("3.2").read_text() == fresh


def test_a_phase_can_be_reset_when_its_markers_are_lost(checkout):
    fresh = checkout.file("3.2").read_text()
    checkout.file("3.2").write_text(fresh.replace("# region lab 3.2", "# shrink"))

    said = checkout.lab("check", "3.2").stdout
    assert (
        "put back the line '# region lab 3.2: shrink, one token at a time' before 'def bgmv_shrink(', or "
        "`lab reset 3` starts the phase again, and keeps a copy"
    ) in said
    head, _, tail = fresh.partition("# region lab 3.3")
    checkout.file("3.2").write_text(head.replace("# endregion\n", "") + "# region lab 3.3" + tail)
    assert "put back the line '# endregion' after the code of lab 3.2, or `lab reset 3`" in (
        checkout.lab("check", "3.2").stdout
    )

    checkout.lab("reset", "3", "--yes")
    assert checkout.file("3.2").read_text() == fresh


def test_a_command_runs_on_what_was_begun(checkout):
    checkout.solve("3.2", "5.1")
    code = "import os; print(os.environ['MINIVLLM_LABS'])"

    begun = checkout.lab("run", "--", "python", "-c", code)
    chosen = checkout.lab("run", "--labs", "3,4", "--", "python", "-c", code + "; raise SystemExit(3)")

    first, *whose, last = begun.stdout.splitlines()
    assert (first, last) == ("yours: 3.2,5.1", "3.2,5.1")
    assert whose == [
        "minivllm.lora.ops.by_token is yours, labs/03_cpu_punica/by_token.py; nothing left TODO",
        "minivllm.lora.lru_cache is yours, labs/05_slot_manager/lru_cache.py; nothing left TODO",
    ]
    first, *whose, last = chosen.stdout.splitlines()
    assert (first, last) == ("yours: 3,4", "3,4")
    assert (
        "minivllm.gpu.sgmv.lora_shrink_op is yours, labs/04_triton_sgmv/lora_shrink_op.py; still TODO: 4.2"
        in whose
    )
    assert chosen.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "40"], "there is no lab '40': give a phase, 0 to 13, or an exercise, 0.1 to 13."),
        (["check", "3.99"], "there is no lab '3.99': give a phase, 0 to 13, or an exercise, 3.1 to 3."),
        (
            ["check", "2.3"],
            "there is no lab 2.3 any more, and no other exercise gets its number; phase 2 has 2.1, ",
        ),
        (["3.2"], "say what to do with 3.2: `lab check 3.2`"),
        (["hint", "foo"], "there is no lab 'foo'"),
        (["notebook", "40"], "there is no lab '40': give a phase, 0 to 13"),
        (["hint", "3"], "3 is a phase; name one exercise, such as 3.1"),
        (["hint", "3.1"], "there are no hints for lab 3.1 yet"),
        (["reset", "x", "--yes"], "there is no lab 'x'"),
        (["run", "--labs", "3", "--", "no-such-command"], "'no-such-command' cannot be run"),
    ],
)
def test_what_is_typed_wrong_is_said_in_a_sentence(checkout, arguments, sentence):
    result = checkout.lab(*arguments)

    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {sentence}")


def test_a_syntax_error_is_said_in_a_sentence_for_its_exercise_alone(checkout):
    checkout.solve("3.2", "3.3")
    path = checkout.file("3.2")
    path.write_text(path.read_text().replace("shrunk = wide", "shrunk = = wide"))

    result = checkout.lab("check", "3")

    place = checkout.place("3.2", "= =")
    assert f"✗ 3.2 shrink, one token at a time  \n    {place}: invalid syntax\n" in result.stdout
    assert "✓ 3.3" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_without_a_checkout_there_is_a_sentence(tmp_path):
    checkout = Checkout(tmp_path)
    (checkout.root / "labs" / "starters.json").unlink()

    result = checkout.lab("check", "3")

    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "run this from a checkout" in result.stderr


@pytest.mark.nightly
def test_the_doctor_says_what_is_there(checkout):
    result = checkout.lab("doctor")

    assert result.returncode == 0, result.stdout
    assert "✓ PyTorch: " in result.stdout
    assert "✓ Triton's interpreter, float32: triton" in result.stdout
    assert " Triton's interpreter, bfloat16: triton" in result.stdout


def lines_as_they_come(file, process):
    """Of a process's output, until it ends."""
    text = ""
    while process.is_alive():
        *whole, _ = file.read_text().removeprefix(text).split("\n") if file.exists() else ("",)
        for line in whole:
            text += f"{line}\n"
            yield line
        time.sleep(0.05)


def test_watching_grades_what_was_begun_and_what_is_saved(checkout, tmp_path):
    checkout.solve("3.4")
    checkout.lab("check", "3.4")  # solved or not, it was begun

    files = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
    process = checkout.start(["labs.kit.cli", "watch", "3"], files)
    try:
        lines = lines_as_they_come(files[1], process)
        assert next(lines).startswith("Watching labs/03_cpu_punica")
        # After a grade comes what a pass leads on to.
        marked = (line[:5] for line in lines if line.startswith(("✓", "✗", "·")))
        assert next(marked) == "✓ 3.4"
        checkout.solve("3.1")
        assert next(marked) == "✓ 3.1"
        checkout.answer("3.3", ("kept + expanded", "expanded"))
        assert next(marked) == "✗ 3.3"
    finally:
        process.kill()
        process.join()


def test_instructors_get_points_as_json_and_junit(checkout):
    checkout.solve("3.2", "3.3")
    checkout.answer("3.4", ("start = row", "start = row + 1"))

    result = checkout.lab("grade", "3", "--json", "--junit", "junit.xml")

    report = json.loads(result.stdout)
    states = {entry["exercise"]: (entry["state"], entry["points"]) for entry in report["exercises"]}
    assert states.pop("3.2") == states.pop("3.3") == ("passed", 1)
    assert states.pop("3.4") == ("failed", 0)
    assert set(states.values()) == {("todo", 0)}
    assert (report["points"], report["of"]) == (2, len(report["exercises"]))
    assert {entry["exercise"] for entry in report["exercises"] if entry["track"] == "side"} == {"3.3"}
    assert report["tracks"] == {"core": {"points": 1, "of": 5}, "side": {"points": 1, "of": 1}}
    cases = {c.get("name")[:3]: c for c in ElementTree.parse(checkout.root / "junit.xml").getroot()}
    assert cases["3.2"].find("failure") is None
    assert cases["3.4"].find("failure").get("type") == "failed"
    assert cases["3.1"].find("failure").get("type") == "todo"


@pytest.mark.nightly
def test_a_release_is_checked_by_the_starters_it_would_hand_out(checkout):
    file = checkout.root / "labs" / "released.json"
    file.write_text("[]")

    unknown = checkout.lab("sync", "--release", "--check")
    nothing_said_of_releases = checkout.lab("sync", "--check")
    recorded = checkout.lab("sync", "--release")
    known = checkout.lab("sync", "--release", "--check")

    assert unknown.returncode == 1
    assert "not yet in labs/released.json: labs/03_cpu_punica/by_token.py" in unknown.stdout
    assert (nothing_said_of_releases.returncode, recorded.returncode, known.returncode) == (0, 0, 0)
    assert "not yet" not in nothing_said_of_releases.stdout + recorded.stdout + known.stdout
    assert len(json.loads(file.read_text())) > 40
