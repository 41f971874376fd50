"""How many small changes of the core and of gpu the tests see: mutmut's operators, on a sample.

    python tests/tools/core_mutants.py OUT --sample 1500 --processes 32
    python tests/tools/core_mutants.py OUT --tree ../other-checkout --same-as OUT/mutants.json
    python tests/tools/core_mutants.py OUT --not-run

First it runs the tests of `make test` once, with coverage.py, to know which tests run which line (OUT/contexts, made
once). Then each change of the sample is tried, in a fork that loads the changed file in the place of its own, by the
tests that run its line, the cheapest files of them first, until one fails. OUT/mutants.jsonl gets a line for each
change as soon as it is judged, so that a run that was broken off goes on where it was; OUT/mutants.json is the whole.

A change is named by file, function and its number in the function, and chosen by a hash of that, so that the same are
chosen of another revision where the function is the same. `--same-as` takes those that a file names instead.
`--tree` is a checkout of another revision; it brings its own labs/kit, which runs the tests.
`--not-run` says which lines and branches of the core no test runs.
"""

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

HERE = Path(__file__).resolve().parent
CORE = (
    *("config.py", "engine_args.py", "errors.py", "progress.py", "sampling_params.py"),
    *("core", "engine", "layers", "lora", "models", "text", "worker"),
)
PARTS = (*CORE, "gpu")
NO_CODE = (cst.Annotation, cst.Parameters, cst.Decorator)
OF_A_FILE = 0.5  # seconds that it costs to collect a file of tests
ROUNDS = (20.0, 80.0)  # seconds of tests in the first rounds
ROUND = 200.0  # and in each that follows: a fork may compute for 600 (`labs.kit.limits`)
SLOWER = 6  # times as long as they took may tests take that a change makes slow
BESIDE = 30.0  # seconds more: the import, and a machine that is busy


class Mutant(NamedTuple):
    """key: file::function::number   code: a hash of the function as it is"""

    key: str
    code: str
    line: int
    old: str
    new: str
    text: str

    @property
    def file(self) -> str:
        return self.key.partition("::")[0]

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")


# ---- the changes --------------------------------------------------------------------------------------------------


def files_of(tree: Path, parts: Iterable[str]) -> list[Path]:
    """Packages' own files left out: they say what a folder is."""
    roots = [tree / "minivllm" / part for part in parts]
    found = [path for root in roots for path in ([root] if root.suffix else sorted(root.rglob("*.py")))]
    return [path for path in found if path.is_file() and path.name != "__init__.py"]


def nodes_of(node: cst.CSTNode, name: str, function: cst.FunctionDef | None) -> Iterator[tuple]:
    """(function's qualified name, function, node) of everything in functions' bodies but docstrings."""
    if isinstance(node, NO_CODE) or is_docstring(node):
        return
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        inner = function or (node if isinstance(node, cst.FunctionDef) else None)
        yield from nodes_of(node.body, f"{name}.{node.name.value}".lstrip("."), inner)
        return
    if function is not None:
        yield name, function, node
    for child in node.children:
        yield from nodes_of(child, name, function)


def is_docstring(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.SimpleStatementLine):
        return False
    return isinstance(node.body[0], cst.Expr) and isinstance(node.body[0].value, cst.SimpleString)


def rank(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed} {key}".encode()).hexdigest()


class Changes:
    """All changes of a file, none of them carried out yet."""

    def __init__(self, tree: Path, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        wrapper = MetadataWrapper(cst.parse_module(self.text))
        self.module, places = wrapper.module, wrapper.resolve(PositionProvider)
        file, counts = path.relative_to(tree).as_posix(), Counter[str]()
        self.by_key: dict[str, tuple] = {}
        for name, function, node in nodes_of(self.module, "", None):
            for kind, operator in mutation_operators:
                for by in operator(node) if isinstance(node, kind) else ():
                    key = f"{file}::{name}::{counts[name]}"
                    counts[name] += 1
                    line = places[node].start.line if node in places else places[function].start.line
                    self.by_key[key] = function, node, by, line

    def make(self, key: str) -> Mutant | None:
        """None where the text stays the same program, or is none."""
        function, node, by, line = self.by_key[key]
        text = self.module.deep_replace(node, by).code
        try:
            tree = ast.parse(text)
            compile(tree, "mutant", "exec", dont_inherit=True)
        except SyntaxError:
            return None
        if ast.dump(tree) == ast.dump(ast.parse(self.text)):
            return None
        code = hashlib.sha256(self.module.code_for_node(function).encode()).hexdigest()[:16]
        return Mutant(key, code, line, self.module.code_for_node(node), self.module.code_for_node(by), text)


def choose(tree: Path, options: argparse.Namespace) -> list[Mutant]:
    changes = {}
    for path in files_of(tree, options.parts):
        of_file = Changes(tree, path)
        changes |= dict.fromkeys(of_file.by_key, of_file)
    if options.same_as:
        named = {entry["key"]: entry["code"] for entry in json.loads(options.same_as.read_text())["mutants"]}
        made = [changes[key].make(key) for key in named if key in changes]
        return [mutant for mutant in made if mutant and mutant.code == named[mutant.key]]
    chosen: list[Mutant] = []
    for key in sorted(changes, key=lambda key: rank(options.seed, key)):
        if len(chosen) == options.sample:
            break
        if mutant := changes[key].make(key):
            chosen.append(mutant)
    return chosen


# ---- which tests run a line ---------------------------------------------------------------------------------------


def measure(tree: Path, folder: Path, options: argparse.Namespace) -> None:
    """Run the tests once, with coverage.py. What a run before has left goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("coverage*"), *folder.glob("tests*.json")]:
        old.unlink()
    watched = ":".join(str(tree / "minivllm" / part) for part in PARTS)
    several = ["-n", str(options.processes), "--dist", "loadfile"] if options.processes > 1 else []
    command = [sys.executable, "-m", "pytest", "-p", "contexts", "-p", "no:cacheprovider", *several]
    command += ["--disable-warnings", *options.tests]
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{HERE}",
        "CONTEXTS": str(folder),
        "CONTEXTS_OF": watched,
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(command, cwd=tree, env=environment)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest gave {done.returncode}")
    data = coverage.Coverage(data_file=str(folder / "coverage"), config_file=False, messages=False)
    data.combine([str(path) for path in folder.glob("coverage.*")], keep=True)
    data.save()
    known: dict[str, dict] = {}
    for part in folder.glob("tests.*.json"):
        known |= json.loads(part.read_text())
    (folder / "tests.json").write_text(json.dumps(known))


class Contexts:
    """What was measured."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree
        self.tests: dict[str, dict] = json.loads((folder / "tests.json").read_text())
        self.data = coverage.CoverageData(str(folder / "coverage"))
        self.data.read()
        self.users: dict[str, list[str]] = {}
        for test, known in self.tests.items():
            for fixture in known["fixtures"]:
                self.users.setdefault(fixture, []).append(test)
        self.by_line = cache(lambda file: self.data.contexts_by_lineno(str(tree / file)))

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Those that run its line, by the cost of their files, then the others of these files: what one of them has
        kept for all was made by the line."""
        contexts = self.by_line(mutant.file).get(mutant.line, [])
        direct = {test for c in contexts for test in self.users.get(c, [c]) if test in self.tests}
        cost = Counter[str]()
        for test in direct:
            cost[file_of(test)] += self.tests[test]["seconds"] + 1e-3
        beside = [test for test in self.tests if file_of(test) in cost and test not in direct]
        return [
            *sorted(direct, key=lambda test: (cost[file_of(test)], test)),
            *sorted(beside, key=lambda test: (cost[file_of(test)], test)),
        ]

    def seconds_of(self, tests: Iterable[str]) -> float:
        tests = list(tests)
        return sum(self.tests[t]["seconds"] for t in tests) + OF_A_FILE * len({file_of(t) for t in tests})


def file_of(test: str) -> str:
    return test.partition("::")[0]


# ---- judging ------------------------------------------------------------------------------------------------------


def parts_of(tests: list[str], contexts: Contexts) -> list[list[str]]:
    """The tests of each round."""
    parts: list[list[str]] = []
    while tests:
        most = ROUNDS[len(parts)] if len(parts) < len(ROUNDS) else ROUND
        part: list[str] = []
        files: set[str] = set()
        cost = 0.0
        for test in tests:
            cost += contexts.tests[test]["seconds"] + OF_A_FILE * (file_of(test) not in files)
            files.add(file_of(test))
            if part and cost > most:
                break
            part.append(test)
        tests = tests[len(part) :]
        parts.append(part)
    return parts


def leave_out_unfit(contexts: Contexts, tree: Path, folder: Path, options: argparse.Namespace) -> None:
    """Tests that do not pass in such a fork as they are say nothing of a change. Found once."""
    from labs.kit.forks import Job, run

    listed = folder / "unfit.json"
    if not listed.exists():
        files: dict[str, list[str]] = {}
        for test in contexts.tests:
            files.setdefault(file_of(test), []).append(test)
        jobs = [
            Job(file, "1.1", {}, only=frozenset(tests), files=(tree / file,)) for file, tests in files.items()
        ]
        unfit: list[str] = []
        for job, outcome in run(jobs, limit=500.0, at_a_time=options.processes):
            fit = {result.test for result in outcome.of("passed", "skipped")}
            unfit += sorted(set(files[job.key]) - fit)
        listed.write_text(json.dumps(unfit, indent=1))
    for test in json.loads(listed.read_text()):
        contexts.tests.pop(test, None)
    print(f"{len(contexts.tests)} tests", flush=True)


def judge(
    mutants: list[Mutant], contexts: Contexts, tree: Path, options: argparse.Namespace
) -> Iterator[dict]:
    """Of each change what became of it, as it is known."""
    from labs.kit.forks import NO_TEST, Job, run
    from labs.kit.overlay import Source

    waiting = [(mutant, parts_of(contexts.tests_of(mutant), contexts), 0) for mutant in mutants]
    while waiting:
        jobs, left = [], []
        for mutant, parts, done in waiting:
            if not parts:
                yield said(mutant, "survived" if done else "not run", "", done)
                continue
            source = {mutant.module: Source(f"{tree / mutant.file} [changed]", mutant.text)}
            files = tuple(tree / file for file in dict.fromkeys(map(file_of, parts[0])))
            job = Job((mutant, parts, done), "1.1", source, True, only=frozenset(parts[0]), files=files)
            jobs.append((contexts.seconds_of(parts[0]), job))
        # Limits are of a whole run, so changes whose tests take about as long are run together.
        jobs.sort(key=lambda pair: pair[0])
        for some in chunks(jobs, 16 * options.processes):
            limit = SLOWER * max(seconds for seconds, _ in some) + BESIDE
            run_some = run([job for _, job in some], limit=limit, at_a_time=options.processes)
            for job, outcome in run_some:
                mutant, parts, done = job.key
                done += len(outcome.results)
                if failed := outcome.of("failed"):
                    yield said(mutant, "killed", f"{failed[0].test}: {failed[0].message[:200]}", done)
                elif outcome.trouble and outcome.trouble != NO_TEST:
                    yield said(mutant, "killed", outcome.trouble, done)
                else:
                    left.append((mutant, parts[1:], done))
        waiting = left


def chunks(items: list, size: int) -> Iterator[list]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def said(mutant: Mutant, verdict: str, by: str, tests: int) -> dict[str, Any]:
    """by: the test that saw it, and what that said   tests: how many were run"""
    shown = {name: value for name, value in mutant._asdict().items() if name != "text"}
    return {**shown, "verdict": verdict, "by": by, "tests": tests}


def tell_not_run(tree: Path, folder: Path, parts: Iterable[str]) -> None:
    """Of each file the lines and the branches that no test takes."""
    measured = coverage.Coverage(data_file=str(folder / "coverage"), config_file=False, messages=False)
    measured.load()
    sums = Counter[str]()
    for path in files_of(tree, parts):
        analysis = measured._analyze(str(path))
        numbers, missing = analysis.numbers, analysis.missing_branch_arcs()
        sums += Counter(
            lines=numbers.n_statements,
            lines_missing=numbers.n_missing,
            branches=numbers.n_branches,
            branches_missing=numbers.n_missing_branches,
        )
        arcs = [f"{begin}->{end}" for begin, ends in sorted(missing.items()) for end in ends]
        if analysis.missing or arcs:
            print(f"{path.relative_to(tree)}: lines {sorted(analysis.missing)} branches {' '.join(arcs)}")
    print(dict(sums))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="a checkout (default: this one)")
    parser.add_argument("--sample", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--same-as", type=Path, help="mutants.json of another run, whose changes are tried")
    parser.add_argument("--parts", nargs="+", default=PARTS, help="of minivllm (default: the core and gpu)")
    parser.add_argument("--tests", nargs="+", default=[], help="for pytest (default: those of make test)")
    parser.add_argument("--not-run", action="store_true", help="say which lines no test runs, and end")
    options = parser.parse_args()
    options.out = options.out.resolve()
    tree, folder, lines = options.tree.resolve(), options.out / "contexts", options.out / "mutants.jsonl"
    if not (folder / "tests.json").exists():
        measure(tree, folder.resolve(), options)
    if options.not_run:
        tell_not_run(tree, folder, options.parts)
        return 0
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    judged = {entry["key"] for entry in known}
    chosen = choose(tree, options)
    left = [mutant for mutant in chosen if mutant.key not in judged]
    print(f"{len(chosen)} changes, {len(left)} to be tried", flush=True)
    with lines.open("a") as file:
        contexts = Contexts(tree, folder)
        leave_out_unfit(contexts, tree, folder, options)
        for entry in judge(left, contexts, tree, options):
            known.append(entry)
            file.write(json.dumps(entry) + "\n")
            file.flush()
            print(f"{len(known)} {entry['verdict']}: {entry['key']}: {entry['by'][:100]}", flush=True)
    wanted = {mutant.key for mutant in chosen}
    known = sorted((entry for entry in known if entry["key"] in wanted), key=lambda entry: entry["key"])
    verdicts = Counter(entry["verdict"] for entry in known)
    (options.out / "mutants.json").write_text(json.dumps({"verdicts": verdicts, "mutants": known}, indent=1))
    print(dict(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
