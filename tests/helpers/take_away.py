"""The checkout without one of its extensions, and all tests there that are not the extension's.

`python tests/helpers/take_away.py NAME [PYTEST'S ARGUMENTS]` takes one away and runs them; without a name it is the
night's, in rotation. Exit status 1 and a list of tests where the extension was missed.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from house import CORE_FOLDERS, ROOT

PARTS = (
    *("minivllm", "labs", "tests", "solutions", "phases", "docs", "adapters", "benchmarks", "examples"),
    *("deploy", "pyproject.toml", "Makefile", "README.md", "constraints.txt"),
)

# Every folder beside the core, and the modules of others that cannot be imported without it. Those that the engine is
# put together from have their line in assembly.py; those on top have none, because nothing below knows them.
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "options": ("gpu.pages.halves", "gpu.triton_halves", "vllm"),
    "sources": (
        "vllm",
        "serving",
        "server",
        "commands.adapter_folder",
        "commands.generate",
        "commands.serve",
    ),
    "policies": ("simulate", "commands.simulate"),
    # Kernels for peers' memory share their parts with the GPU's; the simulator has the pages and graphs of a GPU.
    "gpu": ("vllm", "parallel.peers.adapted_norm_op", "simulate", "commands.simulate"),
    "parallel": (),
    "parallel.peers": (),
    "ahead": (),
    "observe": ("serving", "server", "simulate", "commands"),
    "sizing": ("economics",),
    "serving": ("server", "commands.serve"),
    "vllm": (),
    "server": ("commands.serve",),
    "simulate": ("commands.simulate",),
    "commands": ("cli",),
}
ON_TOP = ("serving", "vllm", "server", "simulate", "commands")

# Part of an extension that can be taken away alone: the file that knows it, and the lines there that do.
INNER = {
    "parallel.peers": (
        "parallel/ranks.py",
        (
            "from minivllm.parallel.peers.group import make_peer_group\n",
            '    if torch.device(device).type == "cuda" and not parallel_config.disable_custom_all_reduce:\n',
            "        return make_peer_group(device)\n",
        ),
    )
}

# Tests of what an extension lets users have, by their files: an engine without it answers them otherwise.
TESTS: dict[str, tuple[str, ...]] = {}

# What a test that needs the extension fails with: its import, or the answer to an option that needs it.
MISSED = r"No module named 'minivllm\.{0}\b|minivllm\.{0}, which is not there"


# `pip install -e` has Python find in the checkout whatever module of minivllm it finds nowhere else.
NOWHERE_ELSE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""


def find_nothing_elsewhere(root: Path) -> None:
    """Have a Python whose path begins with this folder find the folder's package, and none of the checkout's."""
    (root / "sitecustomize.py").write_text(NOWHERE_ELSE)


def extensions() -> list[str]:
    """All folders of the package that are no part of the core, and the inner ones that go alone."""
    folders = {path.parent.name for path in (ROOT / "minivllm").glob("*/__init__.py")}
    return sorted((folders | INNER.keys()) - set(CORE_FOLDERS))


def take_away(name: str, root: Path) -> Path:
    """Copy the checkout to `root`, without the extension's folder and the lines that name it; gives the package."""
    root.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / part)
    find_nothing_elsewhere(root)
    package = root / "minivllm"
    shutil.rmtree(package.joinpath(*name.split(".")))
    if name not in ON_TOP:
        own = f"from minivllm.{name} import {name.upper()}\n", f"    {name.upper()},\n"
        file, own = INNER.get(name, ("assembly.py", own))
        lines = (package / file).read_text().splitlines(keepends=True)
        assert all(lines.count(line) == 1 for line in own), own
        (package / file).write_text("".join(line for line in lines if line not in own))
    return package


def run_there(root: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess:
    """Run a Python that finds the copy first, in its folder."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=root, env=environment)


def outcome(name: str, report: Path) -> tuple[list[str], list[str], int]:
    """Of a report in JUnit's form: the failed tests that need the extension, the others, and how many did not fail."""
    own, others, passed = [], [], 0
    missed = re.compile(MISSED.format(name))
    for case in ET.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error")]
        file = case.get("classname", "").replace(".", "/")
        is_own = any(missed.search(f"{p.get('message')} {p.text}") for p in problems)
        is_own = is_own or any(test in f"{file}/{case.get('name')}" for test in TESTS.get(name, ()))
        if problems:
            (own if is_own else others).append(f"{file}::{case.get('name')}")
        passed += not problems
    return own, others, passed


def run_tests_without(name: str, root: Path, *arguments: str) -> tuple[list[str], list[str], int]:
    """Run tests in a copy: as `outcome`."""
    report = root / "report.xml"
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junit-xml={report}"]
    done = run_there(root, "-m", "pytest", *options, *arguments)
    if not report.exists():
        return [], [f"pytest itself: {done.stdout[-2000:]}{done.stderr[-2000:]}"], 0
    return outcome(name, report)


def of_tonight() -> str:
    names = extensions()
    return names[datetime.date.today().toordinal() % len(names)]


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else of_tonight()
    with tempfile.TemporaryDirectory(prefix="taken-away-") as folder:
        root = Path(folder) / "checkout"
        take_away(name, root)
        workers = [] if any(argument.startswith("-n") for argument in arguments) else ["-n", "2"]
        own, others, passed = run_tests_without(name, root, *workers, *arguments[1:])
    print(f"without {name}: {passed} passed, {len(own)} failed that need it, {len(others)} others failed")
    print("\n".join(others))
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
