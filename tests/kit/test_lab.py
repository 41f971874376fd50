"""The `lab` command, as a learner and an instructor use it."""

import json
import re
import shutil
import subprocess
import time
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from checkout import Checkout

from labs.kit.cli import main
from labs.kit.commands.check import say_what_is_next
from labs.kit.commands.overview import say_next
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

MUTANTS_OF_RUNS = """
[[mutant]]
name = "only_the_first"
misconception = "All rows have the first row's slot."
old = "    return runs"
new = "    return runs[:1]"
"""
# Each ends in another way; 3.3 is no Python, and 3.6 untouched.
ANSWERS = {
    "2.2": (
        "        for i in range(len(self.a)):\n            self._clear_past(slot, i, 0)\n",
        '        raise Todo("lab 2.2: the other half")\n',
    ),
    "3.1": ("slot_of_id[0] = -1", "print('slots', slot_of_id); slot_of_id[0] = -1"),
    "3.2": LAST_SLOT,
    "3.4": ("    return runs", "    return runs[1:]"),
    "3.5": ("found, rows_of", "import os; os.abort(); found, rows_of"),
    "5.1": ("self.move_to_end(key)", "print('key', key); undefined"),
}
PLACES = {"2.2": "# region lab 2.2", "3.3": "raise = ", "3.6": "# region lab 3.6", "5.1": "undefined"}
SAID = {
    "a pass": ("3.1", "✓ 3.1 translate adapter ids to slots  ", "      printed: slots "),
    "a classic mistake": (
        "3.2",
        "✗ 3.2 shrink, one token at a time  ",
        "    comparing with 2 known mistakes\n",
        "It looks like this: Slot -1 means no adapter; as an index it is the last slot.\n",
    ),
    "a mistake of one's own": ("3.4", "✗ 3.4 ", "It is none of the 1 known mistakes.\n"),
    "no Python": ("3.3", "✗ 3.3 expand ", "  (side track)  \n    {place}: invalid syntax\n"),
    "a crash": ("3.5", "✗ 3.5 ", "the tests' process ended before they did, in test_"),
    "untouched": ("3.6", "· 3.6 the whole product of a wrapped linear  TODO {place}\n"),
    "done in part": ("2.2", "· 2.2 write and clear a slot  TODO {place}\n"),
    "a name that is not there": (
        "5.1",
        "✗ 5.1 ",
        "NameError: name 'undefined' is not defined\n      printed: key 1\n      your code: {place}",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("lab"))
    for number, mutants in (("3.2", MUTANTS), ("3.4", MUTANTS_OF_RUNS)):
        (checkout.root / f"labs/03_cpu_punica/mutants/{number}.toml").write_text(mutants)
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


@pytest.fixture(scope="module")
def told(shared):
    """What one `lab check` says of answers that end in each of the ways that there are: by exercise, and in all."""
    shared.forget()
    for number, change in ANSWERS.items():
        shared.answer(number, change)
    path = shared.file("3.3")
    path.write_text(path.read_text().replace('raise Todo("lab 3.3', 'raise = Todo("lab 3.3'))
    result = shared.lab("check", "3", "5.1", "2.2", "3.2")
    of = {part[2:5]: part for part in re.split(r"^(?=[✓✗·] )", result.stdout, flags=re.M)[1:]}
    places = {number: shared.place(number, text) for number, text in PLACES.items()}
    return SimpleNamespace(result=result, of=of, places=places)


def test_several_exercises_may_be_named_and_a_phase_among_them_and_are_told_in_their_order(told):
    assert told.result.returncode == 1
    assert told.result.stdout.startswith("Checking 3, 5.1, 2.2, 3.2: ")
    assert list(told.of) == ["3.1", "3.2", "3.3", "3.4", "3.5", "3.6", "5.1", "2.2"]
    assert told.result.stdout.count("✗ 3.2 ") == 1, "it was named twice"
    assert "Traceback" not in told.result.stdout + told.result.stderr


@pytest.mark.parametrize("way", SAID)
def test_what_became_of_an_answer_is_told_under_its_exercise(told, way):
    number, *sentences = SAID[way]

    for sentence in sentences:
        assert sentence.format(place=told.places.get(number)) in told.of[number]


def test_only_the_mistake_that_was_made_is_named_and_none_where_the_error_says_it_all(told):
    assert "Slot 0 is a slot" not in told.of["3.2"]
    assert "It looks like this" not in told.of["3.4"]
    assert "known mistake" not in told.of["5.1"] and "\n>" not in told.of["5.1"]
    assert "stuck? lab hint 3.2\n" in told.result.stdout
    assert "lab debug" not in told.result.stdout, "the mistake is named"


def test_the_trace_is_shown_when_it_is_asked_for_and_how_to_search_where_no_mistake_is_known(checkout):
    checkout.answer("5.1", ANSWERS["5.1"])

    said = checkout.lab("check", "5.1", "--trace").stdout

    assert re.search(r"\n +> +print\('key', key\); undefined\n", said)
    assert (
        "what your code prints is shown; lab debug 5.1 stops at breakpoint() and where a test fails; lab api 5.1 "
        in said
    )


def test_a_pass_of_one_exercise_is_shown_until_its_own_code_changes(checkout):
    refused, spoilt = checkout.lab("diff", "3.4"), checkout.lab("diff", "3.4", "--spoil")
    checkout.solve("1.1", "3.4")
    path = checkout.file("3.4")
    whole = path.read_text()
    path.write_text(whole.replace('raise Todo("lab 3.1', 'raise (Todo("lab 3.1'))  # which is no Python

    result = checkout.lab("check", "3.4")
    path.write_text(whole)
    passed, earned = checkout.lab().stdout, checkout.lab("diff", "3.4")
    path.write_text(whole.replace("    return runs", "    return [*runs]"))
    changed = checkout.lab().stdout

    assert result.returncode == 0 and "✓ 3.4 runs of rows with the same slot" in result.stdout
    counts = r"1 of \d+ on the core path, 0 of \d+ on the kernel path, .*, 0 of \d+ on side tracks solved\.\n"
    assert re.match(counts, passed) and "Next: lab 1.1" in passed
    for line in ("✓ 3.4 runs of rows with the same slot\n", "~ 1.1 ", "· 3.1 "):
        assert f"\n  {line}" in passed
    assert "\n03_cpu_punica  core path, 1 of 5\n" in passed
    assert "\n04_triton_sgmv  kernel path, 0 of 4\n" in passed
    assert "\n  ~ 3.4 runs of rows with the same slot  changed since it passed\n" in changed
    assert changed.count("changed since it passed") == 1 and "since it passed" not in passed
    assert refused.returncode == 2 and "has not passed" in refused.stderr
    lines = [line.split() for line in spoilt.stdout.splitlines()]
    assert [">", "return", "runs"] in lines
    assert any(line[:3] == [">", "raise", 'Todo("lab'] for line in lines)
    assert earned.stdout.startswith("yours is ours, but for docstrings, comments and layout\n")


def test_of_a_phase_the_pages_are_listed_of_what_may_be_used(checkout):
    said = checkout.lab("api", "3").stdout.splitlines()

    assert [line.split("  ")[0] for line in said] == [f"lab api 3.{n}" for n in range(1, 7)]
    assert said[1] == "lab api 3.2  shrink, one token at a time"


@pytest.mark.nightly
def test_two_mistakes_at_once_are_both_recognised(checkout):
    checkout.answer(
        "7.1",
        ("for request in self.requests], dtype=np.int64)", "for request in self.requests]).astype(np.int32)"),
        ('        entries.sort(key=attrgetter("request.adapter_id"))\n', ""),
    )

    said = checkout.lab("check", "7.1").stdout

    named = [line for line in said.split("\n") if "looks like this" in line]
    assert any("An id may have 63 bits" in line for line in named)
    assert any("In the order of adapters the rows of one adapter are a run" in line for line in named)


def test_what_has_changed_since_it_passed_is_to_be_checked_again(capsys):
    exercise = read_engine()["3.2"]

    say_next(exercise, has_changed=True)
    changed = capsys.readouterr().out
    say_next(exercise)

    assert re.search(
        r"\n  changed since it passed: labs/\S+:\d+\n  lab check 3.2 checks it again\n$", changed
    )
    assert "since it passed" not in capsys.readouterr().out


CORE = " ".join(number for number, exercise in read_engine().items() if track_of(exercise) == "core")


@pytest.mark.parametrize(
    ("passed", "begun", "last", "following"),
    [
        ("3.2 1.6", "", "1.6", "2.1"),
        ("3.2 1.6", "5.1", "1.6", "5.1"),
        ("3.2 1.6 5.1", "", "5.1", "5.2"),
        ("5.4", "", "5.4", "5.7"),
        ("5.3 5.4", "", "5.4", "5.5"),
        (CORE, "", "7.4", None),
        (CORE.replace("3.2", ""), "", "7.4", "3.2"),
        (f"{CORE} 4.1", "", "7.4", "4.2"),
    ],
    ids=[
        *("after a pass, 1.7 is a side track", "what was begun", "after the last pass"),
        *("no side track of the phase was begun", "one was", "the core path is done"),
        *("but for one", "another path was begun"),
    ],
)
def test_what_comes_next_is_on_the_learners_own_path(passed, begun, last, following):
    exercises = read_engine()
    states = dict.fromkeys(exercises, "todo") | dict.fromkeys(begun.split(), "started")
    states |= dict.fromkeys(passed.split(), "passed")

    found = next_of(list(exercises.values()), states, last)

    assert (found and found.number) == following


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
    assert "core path: 4 passed, 1 failed, 0 TODO\n" in failing.stdout, "ours was 3.4 for the others"
    assert "is done" not in failing.stdout
    assert failing.returncode == 1
    assert "core path: 5 passed, 0 failed, 0 TODO\nside tracks: 0 passed, 0 failed, 1 TODO\n" in solved.stdout
    assert "stuck?" not in solved.stdout
    assert "Phase 03 is done, and its side tracks are yours to take or leave.\n" in solved.stdout
    assert "\nNext: lab 5.1," in solved.stdout
    assert solved.returncode == 0
    assert "03_cpu_punica  core path, 5 of 5 ✓ done\n" in checkout.lab().stdout
    assert "stuck? lab hint 3.3\n" in checkout.lab("check", "3.3").stdout


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


MAPPING = "minivllm/lora/mapping.py"


@pytest.fixture
def change(checkout):
    """The engine of a checkout in git, to be changed where `compute_runs` returns."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "minivllm"], ["commit", "-qm", "all"]):
        subprocess.run(["git", *identity, *command], cwd=checkout.root, check=True)
    path = checkout.root / MAPPING
    whole = path.read_text()
    yield lambda new: path.write_text(whole.replace("    return runs\n", new))
    path.write_text(whole)
    shutil.rmtree(checkout.root / ".git")


def test_code_of_ours_that_was_edited_is_named_and_commands_go_on(checkout, change):
    quiet = checkout.lab("hunt")
    change("    return runs[:1]\n")

    said = [checkout.lab(*command) for command in ([], ["hunt", "17"], ["check", "5.1"])]

    assert quiet.stderr == ""
    for result in said:
        assert result.stderr.startswith(f"{MAPPING} is not as in git. Answers belong into labs/, ")
        assert result.stderr.count("\n") == 1
    assert [result.returncode for result in said] == [0, 0, 1], said[0].stderr
    assert "Next: lab " in said[0].stdout and "· 5.1 " in said[2].stdout


def test_code_of_ours_that_python_cannot_read_is_named_and_commands_go_on(checkout, change):
    change("    return runs[\n")
    place = f"{MAPPING}:{1 + (checkout.root / MAPPING).read_text().split(chr(10)).index('    return runs[')}"

    said = [checkout.lab(*command) for command in ([], ["hunt"], ["hunt", "17"], ["check", "3"])]
    from_doctor = checkout.execute(
        "from labs.kit.doctor import _engine\nfound = _engine()\nprint(found.is_good, found.text)"
    )

    for result in said:
        assert result.stderr.startswith(f"{place}: '[' was never closed. It is our code, ")
        assert result.stderr.count("\n") == 1
    assert [result.returncode for result in said] == [0, 0, 0, 1]
    assert "Next: lab 0.1" in said[0].stdout and " 8.28 " in said[1].stdout
    counts = "core path: 0 passed, 0 failed, 5 TODO\nside tracks: 0 passed, 0 failed, 1 TODO\n"
    assert counts in said[3].stdout
    assert from_doctor.stdout.startswith(f"False {place}: ")


def test_hints_come_one_after_another_and_the_last_stays(checkout):
    said = [checkout.lab("hint", "3.2").stdout.split("\n", 1) for _ in range(4)]
    without = checkout.lab("hint", "3.1").stderr

    assert [head.split(",")[0] for head, _ in said] == [f"Hint {n} of 3" for n in (1, 2, 3, 3)]
    assert [text for _, text in said[:2]] == ["a nudge\n", "the approach\n"]
    assert said[2][1] == said[3][1] == "for token, slot in ...:\n    y = A @ x\n"
    assert without == "error: there are no hints for lab 3.1 yet\n"


def test_a_hint_for_no_number_is_for_where_one_is(checkout):
    checkout.solve("1.2")
    at_the_start = checkout.lab("hint").stdout
    checkout.lab("check", "3.2")  # a stub
    checked = [checkout.lab("hint").stdout for _ in range(2)]
    checkout.lab("check", "1.2")
    after_a_pass = checkout.lab("hint").stdout

    assert at_the_start.startswith("lab 1.2, which you have begun\nHint 1 of 3, lab 1.2: ")
    assert [said.split("\n", 2)[:2] for said in checked] == [
        ["lab 3.2, which you checked last", f"Hint {n} of 3, lab 3.2: shrink, one token at a time"]
        for n in (1, 2)
    ]
    assert after_a_pass.startswith("lab 1.3, which is next on your path\nHint 1 of 3, lab 1.3: ")


def test_a_hint_for_no_number_may_be_a_hunts(checkout):
    checkout.lab("hunt", "17", "--check")

    said = checkout.lab("hint").stdout

    assert said.startswith("lab 8.17, which you checked last\nHint 1 of 3, hunt 8.17: ")


def test_reset_puts_back_one_stub_and_keeps_what_was_there(checkout):
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


def test_a_phase_can_be_reset_when_its_markers_are_lost(checkout):
    fresh = checkout.file("3.2").read_text()
    checkout.file("3.2").write_text(fresh.replace("# region lab 3.2", "# shrink"))

    said = checkout.lab("check", "3.2").stdout
    checkout.lab("reset", "3", "--yes")

    line = "'# region lab 3.2: shrink, one token at a time' before 'def bgmv_shrink('"
    assert f"put back the line {line}, or `lab reset 3` starts the phase again, and keeps a copy" in said
    assert checkout.file("3.2").read_text() == fresh


def test_a_command_runs_on_what_was_begun_and_is_done(checkout):
    checkout.solve("3.2", "5.1")
    checkout.answer("2.2", ANSWERS["2.2"])
    code = "import os; print(os.environ['MINIVLLM_LABS'])"

    begun = checkout.lab("run", "--", "python", "-c", code)
    chosen = checkout.lab("run", "--labs", "3,4", "--", "python", "-c", code + "; raise SystemExit(3)")

    assert begun.stdout.splitlines() == [
        "yours: 3.2,5.1",
        "ours: 2.2, of which a part is still TODO",
        "minivllm.lora.ops.by_token is yours, labs/03_cpu_punica/by_token.py; nothing left TODO",
        "minivllm.lora.lru_cache is yours, labs/05_slot_manager/lru_cache.py; nothing left TODO",
        "3.2,5.1",
    ]
    first, *whose, last = chosen.stdout.splitlines()
    assert (first, last, chosen.returncode) == ("yours: 3,4", "3,4", 3)
    shrink = "minivllm.gpu.sgmv.lora_shrink_op is yours, labs/04_triton_sgmv/lora_shrink_op.py"
    assert f"{shrink}; still TODO: 4.2" in whose


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
        (["reset", "x", "--yes"], "there is no lab 'x'"),
        (["run", "--labs", "3", "--", "no-such-command"], "'no-such-command' cannot be run"),
    ],
)
def test_what_is_typed_wrong_is_said_in_a_sentence(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr("sys.argv", ["lab", *arguments])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {sentence}")


def test_without_a_checkout_there_is_a_sentence(checkout):
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
    files = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
    process = checkout.start(["labs.kit.cli", "watch", "3"], files)
    try:
        lines = lines_as_they_come(files[1], process)
        assert next(lines).startswith("Watching labs/03_cpu_punica")
        # After a grade comes what a pass leads on to.
        marked = (line[:5] for line in lines if line.startswith(("✓", "✗", "·")))
        assert next(marked) == "✓ 3.4"
        checkout.answer("3.1", ("slot_of_id[0] = -1", "undefined"))
        assert next(marked) == "✗ 3.1"
    finally:
        process.kill()
        process.join()


def test_instructors_get_points_as_json_and_junit(checkout):
    checkout.solve("3.4")
    path = checkout.file("3.3")
    path.write_text(path.read_text().replace('raise Todo("lab 3.3', 'raise = Todo("lab 3.3'))

    result = checkout.lab("grade", "3", "--json", "--junit", "junit.xml")

    report = json.loads(result.stdout)
    states = {entry["exercise"]: (entry["state"], entry["points"]) for entry in report["exercises"]}
    assert states == {
        **dict.fromkeys(["3.1", "3.2", "3.5", "3.6"], ("todo", 0)),
        "3.3": ("failed", 0),
        "3.4": ("passed", 1),
    }
    assert (report["points"], report["of"]) == (1, 6)
    assert {entry["exercise"] for entry in report["exercises"] if entry["track"] == "side"} == {"3.3"}
    assert report["tracks"] == {"core": {"points": 1, "of": 5}, "side": {"points": 0, "of": 1}}
    cases = {c.get("name")[:3]: c for c in ElementTree.parse(checkout.root / "junit.xml").getroot()}
    assert cases["3.4"].find("failure") is None
    assert [cases[number].find("failure").get("type") for number in ("3.3", "3.1")] == ["failed", "todo"]


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
