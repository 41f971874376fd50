"""The site builds without a warning and without a network, and its reference names modules that exist."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = re.compile(r"^\.\. automodule:: (\S+)$", re.M)


def test_the_reference_names_modules_that_exist_each_once():
    """`make docs` refuses anything else; here it is told in every run."""
    modules = Counter(MODULE.findall((ROOT / "docs" / "api.md").read_text()))

    assert len(modules) > 50
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name, count in modules.items() if count > 1] == []


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-c",
        "docs",
        ".",
        str(tmp_path),
    ]

    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "docs" / "index.html").stat().st_size > 5_000
    page = (tmp_path / "solutions" / "03_cpu_punica" / "README.html").read_text()
    answers = page.split("<h2>")[1:]
    assert len(answers) == 6
    assert all(answer.index("<details") < answer.index("<pre") for answer in answers)
