"""`lab grade --submissions`: no submission gives itself points, or harms another one."""

import csv
import json
import shutil
from xml.etree import ElementTree

import pytest
from checkout import Checkout, asked_for

from labs.kit.confine import LEAST_ABI, landlock_abi
from labs.kit.refusals import check
from labs.kit.regions import LabError, read_engine
from labs.kit.tampering import judges, replaced
from tests.oracles import rows
from tests.tools.nights import by_day

pytestmark = pytest.mark.skipif(
    landlock_abi() < LEAST_ABI, reason="nothing is run where nothing can be confined"
)

# What stands before the loop of 3.4, whose answer is right otherwise. Each is run as if nobody had read it before.
HOSTILE = {
    "endless loop": "while True: pass",
    "an endless loop that no signal ends": (
        "import signal, time\n"
        "for n in (signal.SIGUSR1, signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU): signal.signal(n, signal.SIG_IGN)\n"
        "while True: time.sleep(1)"
    ),
    "a process too many": "import os\nfor n in range(20): os.fork() or os._exit(0)",
    "huge allocation": "held = bytearray(16 << 30)",
    "huge tensor": "import torch\nheld = torch.zeros(1 << 33)",
    "changing a mode": "import labs, os\nos.chmod(labs.__path__[0], 0)",
    "writing into the checkout": "import labs\nopen(labs.__path__[0] + '/harm.txt', 'w').write('x')",
    "killing the grader": "import os\nos.kill(os.getppid(), 9)",
    "leaving with 0": "import os\nos._exit(0)",
    "a skip": "import unittest\nraise unittest.SkipTest('easy')",
    "made-up results": (
        "import json, os\n"
        "test = 'tests/phase_03/test_slot_mapping.py::test_x'\n"
        "said = [['', 'result', [test, 'passed', '', None, '']], ['', 'end', 0]]\n"
        "for n in range(3, 40):\n"
        "    for m in map(json.dumps, said):\n"
        "        try: os.write(n, len(m).to_bytes(4, 'big') + m.encode())\n"
        "        except OSError: pass\n"
        "os._exit(0)"
    ),
    "the end of the session": "import pytest\npytest.exit('done', 0)",
    "another assertion": "import torch\ntorch.testing.assert_close = lambda *a, **k: None",
    "another pytest": (
        "import _pytest.runner as r\n"
        "def well(cls, func, when, reraise=None):\n"
        "    return cls(None, None, 0, 0, 0, when=when, _ispytest=True)\n"
        "r.CallInfo.from_call = classmethod(well)\n"
        "raise AssertionError"
    ),
    "another report": (
        "import _pytest.reports as r\nr.TestReport.passed = property(lambda self: True)\nraise AssertionError"
    ),
}


def submit(folder, student, code=""):
    """A student's starter of 3.4: our answer, after some code."""
    exercise = read_engine()["3.4"]
    first = "    runs: list[tuple[int, slice]] = []\n"
    assert exercise.text.count(first) == 1
    hostile = "".join(f"    {line}\n" for line in code.split("\n")) if code else ""
    path = folder / student / "labs/03_cpu_punica/mapping.py"
    path.parent.mkdir(parents=True)
    path.write_text(exercise.text.replace(first, hostile + first))
    return path.parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def graded(checkout, tmp_path_factory, request):
    """All that are asked for together, between two honest ones, unread: `refusals` would stop most of them before."""
    folder = tmp_path_factory.mktemp("submissions")
    hostile = [name for name in HOSTILE if name in asked_for(request)]
    for name in ("a student", *hostile, "the last student"):
        submit(folder, name, HOSTILE.get(name, ""))
    code = (
        "import json, pathlib\n"
        "from labs.kit import forks, submissions as s\n"
        "from labs.kit.regions import read_engine\n"
        "forks.GRACE = 1\n"
        "s.check = lambda *arguments: None\n"
        f"found = s.read_submissions(pathlib.Path({str(folder)!r}))\n"
        "print(json.dumps(s.grade_submissions(found, [read_engine()['3.4']], memory=2 << 30, limit=2)))\n"
    )
    # No fork of a server: made-up results are written into whatever it inherits, too.
    result = checkout.run("-c", code)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", by_day(HOSTILE, one_in=2))
def test_a_hostile_submission_gets_no_point(graded, name):
    assert graded[name]["points"] == 0
    assert graded[name]["exercises"][0]["state"] == "failed"
    assert graded[name]["exercises"][0]["message"]


def test_a_function_of_the_tests_that_is_another_is_named(monkeypatch):
    before = judges()
    assert "tests.oracles.rows.assert_rows_equal" not in replaced(before)

    monkeypatch.setattr(rows, "assert_rows_equal", lambda *tensors: None)

    assert "tests.oracles.rows.assert_rows_equal" in replaced(before)


def test_others_are_graded_as_if_it_were_not_there(graded):
    assert graded["a student"]["points"] == graded["the last student"]["points"] == 1


def test_the_checkout_is_as_it_was(checkout, graded):
    assert not (checkout.root / "labs/harm.txt").exists()
    assert (checkout.root / "labs").stat().st_mode & 0o700 == 0o700


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import pytest",
        "from labs.kit import forks",
        "from labs.kit.overlay import ROOT",
        "__import__('os')",
        "open('/etc/passwd')",
        "eval('1')",
        "torch.os._exit(0)",
        "torch.testing.assert_close = print",
        "().__class__.__base__.__subclasses__()",
        "getattr(torch, 'o' + 's')",
        "class Same(list): __eq__ = lambda a, b: True",
        "type('Same', (list,), {'__eq__': lambda a, b: True})",
    ],
)
def test_what_no_answer_needs_is_refused_with_its_line(line):
    ours = "import torch\n\n\ndef answer(x):\n    return torch.zeros(len(x))\n"

    with pytest.raises(LabError, match=r"^by_token.py:7: .* is nothing that an answer may use$"):
        check(f"{ours}\n{line}\n", ours, "by_token.py")


def test_what_our_module_says_and_harmless_imports_are_not_refused():
    ours = "import os\n\n\ndef answer(x):\n    return os.fspath(x)\n"

    check(
        f"import math\nfrom collections import Counter\n{ours}\n\nhalf = math.pi / len(Counter('ab'))\n",
        ours,
        "request.py",
    )


def test_instructors_get_json_junit_and_csv(checkout, tmp_path):
    submissions = tmp_path / "submissions"
    submit(submissions, "=ada")
    submit(submissions, "bob", "import os")
    (submissions / "cleo").mkdir()
    shutil.copytree(checkout.root / "labs/03_cpu_punica", submissions / "dan/03_cpu_punica")

    result = checkout.lab(
        "grade", "3.4", "--submissions", str(submissions), "--json", "--junit", "g.xml", "--csv", "g.csv"
    )

    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    states = {student: points["exercises"][0]["state"] for student, points in reports.items()}
    assert states == {"=ada": "passed", "bob": "failed", "cleo": "todo", "dan": "todo"}
    assert reports["=ada"]["tracks"] == {"core": {"points": 1, "of": 1}}
    suites = ElementTree.parse(checkout.root / "g.xml").getroot()
    assert [(suite.get("name"), suite.get("failures")) for suite in suites] == [
        ("=ada", "0"), ("bob", "1"), ("cleo", "1"), ("dan", "1"),
    ]  # fmt: skip
    rows = list(csv.DictReader((checkout.root / "g.csv").open()))
    assert [(row["student"], row["exercise"], row["points"]) for row in rows] == [
        ("'=ada", "3.4", "1"), ("bob", "3.4", "0"), ("cleo", "3.4", "0"), ("dan", "3.4", "0"),
    ]  # fmt: skip
    assert "the import of os is nothing that an answer may use" in rows[1]["message"]
