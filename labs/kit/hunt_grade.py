"""Grades hunts: the learner's test on sound and broken engines, then the learner's fix on the incident's tests."""

import ast
import difflib
import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labs.kit.forks import SKIPPED, Job, Outcome, run
from labs.kit.hunt import Hunt, read_hunts
from labs.kit.hunt_rules import source_reading
from labs.kit.limits import NO_END
from labs.kit.overlay import Source, compile_source, engine_file
from labs.kit.regions import ROOT, LabError

SECONDS = 15.0  # that a test of a learner's may compute, on one engine
SOUND, BROKEN, VARIANT, OTHER, FIX, OTHERWISE, TOO_STRONG = (
    "the sound engine",
    "the broken engine",
    "an engine where ",  # and what users would see there
    "another fault",
    "your fix",
    "a sound engine that is written otherwise",
    "a sound engine which ",  # and what it does otherwise; what a test that fails there asks for
)
TOO_WEAK = "your test passes on the broken engine, and must fail there"
DOES_NOT_END = "a call hangs, or computes for too long, that ends on the sound engine"


@dataclass(frozen=True)
class HuntGrade:
    """What came of one hunt.

    state     passed, failed or todo
    step      "test" or "fix": what was graded last
    problems  why it did not pass, in sentences; [] for what is todo
    """

    hunt: Hunt
    state: str
    step: str
    problems: list[str]
    digest: str = ""
    seconds: float = 0.0


def grade_hunt(hunt: Hunt, is_right: bool = False, solved: Collection[str] = ()) -> HuntGrade:
    """Both steps, the second once the first is done. Then, too, the broken modules are handed out.

    is_right   the test, as it stands, was found right before
    solved     exercises whose code may be in what is handed out
    """
    if hunt.test_text() == hunt.starter:
        return HuntGrade(hunt, "todo", "test", [])
    problems, seconds = ([], 0.0) if is_right else grade_test(hunt, hunt.test_file)
    if problems:
        return HuntGrade(hunt, "failed", "test", problems, seconds=seconds)
    hunt.hand_out(solved)
    if hunt.is_as_handed_out():
        return HuntGrade(hunt, "todo", "fix", [], seconds=seconds)
    problems, more = grade_fix(hunt, hunt.fixes())
    state = "failed" if problems else "passed"
    return HuntGrade(hunt, state, "fix", problems, hunt.digest(), seconds + more)


def grade_test(hunt: Hunt, path: Path, limit: float = SECONDS) -> tuple[list[str], float]:
    """What is wrong with a test for a hunt, and the seconds that it took to find out.

    It passes on the sound engine, and on others that are as sound. It fails on the broken one and its variants. It
    passes with other faults.
    limit   seconds that it may compute on one engine
    """
    if found := source_reading(path.read_text(encoding="utf-8")):
        line, what = found
        return [
            f"{path.name}:{line}: {what} reads how the engine is written; a test of a hunt asks what the engine does, "
            "so that it holds for every form of the mistake"
        ], 0.0
    problems, seconds = _judge([_job(SOUND, {}, path), _job(BROKEN, hunt.broken(), path)], limit)
    if problems == [TOO_WEAK]:
        return [TOO_WEAK + advice_on_weakness(hunt, path, limit)], seconds
    if problems:
        return problems, seconds
    jobs = [_job(VARIANT + fault.lets, fault.sources(), path) for fault in hunt.faults[1:]]
    jobs += [_job(OTHERWISE, form.sources(), path) for form in hunt.right_forms]
    for other in read_hunts().values():
        if other.id != hunt.id and other.id not in hunt.kin:
            with suppress(LabError):  # somebody has edited our code where this fault would be
                jobs.append(_job(f"{OTHER} (hunt {other.id})", other.broken(), path))
    jobs += jobs_on_sound_engines(hunt, path)
    problems, more = _judge(jobs, limit)
    return problems, seconds + more


def jobs_on_sound_engines(hunt: Hunt, path: Path) -> list[Job]:
    """A test on the engines of `sound.toml`, as far as nobody has edited our code where they differ from it."""
    jobs = []
    for form in hunt.sound_engines:
        with suppress(LabError):
            jobs.append(_job(f"{TOO_STRONG}{form.lets}; {form.means}", form.sources(), path))
    return jobs


def advice_on_weakness(hunt: Hunt, path: Path, limit: float | None) -> str:
    """Whether a test that sees nothing on the broken engine calls what is broken there; "" where nobody can know."""
    trapped = {}
    for module, source in hunt.broken().items():
        text = with_traps(engine_file(module).read_text(encoding="utf-8"), source.text)
        if text is None:
            return ""
        trapped[module] = source._replace(text=text)
    [(_, outcome)] = run([_job(BROKEN, trapped, path)], limit=limit)
    if outcome.of("failed") or outcome.trouble:
        return ": it calls the code that is broken, but what it asks for is right there, too"
    return ": it never calls the code that is broken, so a step of what users did is missing"


def with_traps(sound: str, broken: str) -> str | None:
    """The broken text, each of whose functions that differ raises at once. None where something else differs."""
    theirs = broken.splitlines()
    numbers = [number for number, line in enumerate(theirs, 1) if is_code(line)]
    codes = [list(filter(is_code, lines)) for lines in (sound.splitlines(), theirs)]
    changed = {
        numbers[min(at, len(numbers) - 1)]
        for tag, _, _, begin, end in difflib.SequenceMatcher(None, *codes, False).get_opcodes()
        for at in range(begin, max(end, begin + 1))
        if tag != "equal"
    }
    functions = [
        n for n in ast.walk(ast.parse(broken)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    traps = {}
    for line in changed:
        around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
        if not around:
            return None
        first = max(around, key=lambda f: f.lineno).body[0]
        traps[first.lineno] = " " * first.col_offset + "raise RuntimeError('here it is broken')"
    for line in sorted(traps, reverse=True):
        theirs.insert(line - 1, traps[line])
    return "\n".join(theirs) + "\n"


def is_code(line: str) -> bool:
    return not line.isspace() and bool(line) and not line.lstrip().startswith("#")


def _job(engine: str, sources: dict[str, Source], path: Path) -> Job:
    return Job(engine, path.stem, sources, stop_at_first=True, files=(path,))


def _judge(jobs: Iterable[Job], limit: float | None) -> tuple[list[str], float]:
    """What is wrong with the outcomes, each sentence once, and the seconds that they took: several run at a time.

    The sentences come in the order of the jobs, whichever ends first.
    """
    began = time.monotonic()
    jobs = list(jobs)
    order = {id(job): place for place, job in enumerate(jobs)}  # several may have the same key
    outcomes = sorted(run(jobs, limit=limit), key=lambda ended: order[id(ended[0])])
    said = [problem_of(job.key, outcome) for job, outcome in outcomes]
    return [text for text in dict.fromkeys(said) if text], time.monotonic() - began


def problem_of(engine: str, outcome: Outcome) -> str | None:
    """Why this is not what a right test does on that engine; None if it is."""
    failed = [result for result in outcome.of("failed", "todo") if "::" in result.test]
    skipped = [r for r in outcome.results if r.outcome == "skipped" or r.message.startswith(SKIPPED)]
    if skipped and engine != FIX:
        name, why = skipped[0].test.rpartition("::")[2], skipped[0].message.removeprefix(f"{SKIPPED}: ")
        return f"{name or skipped[0].test} is skipped on {engine}, and must run there: {why}"
    is_variant = engine.startswith(VARIANT)
    endless = next((result.message for result in failed if NO_END in result.message), outcome.trouble)
    if endless and (endless != outcome.trouble or not failed):
        advice = f"; {DOES_NOT_END if engine == FIX else 'bound its steps or its seconds'}"
        return f"on {engine}: {endless}" + (advice if NO_END in endless else "")
    broken_file = [result for result in outcome.of("failed", "todo") if "::" not in result.test]
    if broken_file:
        return f"on {engine} the file cannot be read: {broken_file[0].message}"
    if engine == BROKEN or is_variant:
        weak = f"your test passes on {engine}: another form of the same fault, on which it must fail, too"
        return None if failed else weak if is_variant else TOO_WEAK
    if failed:
        name = failed[0].test.partition("::")[2]  # with its class, whose name is the subject of the test's
        if engine == FIX and failed[0].test.partition("::")[0].startswith("tests/"):
            return f"with your fix it does not hold that {promise_of(name)} ({name}): {failed[0].message}"
        if engine.startswith(TOO_STRONG):
            which, _, means = engine.partition("; ")
            return f"{name} is too strong: {means}. It fails on {which}: {failed[0].message}"
        return f"{name} fails on {engine}, and must pass there: {failed[0].message}"
    return None if outcome.of("passed") else f"on {engine} no test ran"


def promise_of(test: str) -> str:
    """What a test of the project says by its name: `TestReload::test_happens_once[::a]` that reload happens once."""
    subject, _, said = test.partition("[")[0].rpartition("::")
    subject = re.sub(
        r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", subject.removeprefix("Test")
    ).lower()
    said = re.sub(r"^test_(\d+_)?", "", said).replace("_", " ")
    return f"{subject} {said}".strip()


def grade_fix(hunt: Hunt, fixes: dict[str, Source]) -> tuple[list[str], float]:
    """What is wrong with a fix, and the seconds: it passes the learner's test, and the tests in the project."""
    for source in fixes.values():
        try:
            compile(compile_source(source), source.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise LabError(f"{Path(source.path).relative_to(ROOT)}:{error.lineno}: {error.msg}") from None
    jobs = [_job(FIX, fixes, hunt.test_file)] if hunt.test_text() != hunt.starter else []
    return _judge([*jobs, incident_job(hunt, FIX, fixes)], None)


def incident_job(hunt: Hunt, key: str, sources: dict[str, Source]) -> Job:
    """The project's own tests of the incident, on an engine."""
    tests = hunt.own_tests()
    files = tuple(ROOT / path for path in dict.fromkeys(path for path, _ in tests))
    names = frozenset(f"{Path(path).name}::*" if name == "*" else name for path, name in tests)
    return Job(key, hunt.number, sources, stop_at_first=True, files=files, names=names)


def spoiler(hunt: Hunt) -> str:
    """What the fault and its variants change, as diffs."""
    parts = []
    for fault in hunt.faults:
        parts.append(f"# {fault.what}")
        for edit in fault.edits:
            lines = difflib.unified_diff(
                edit.old.splitlines(),
                edit.new.splitlines(),
                edit.module,
                f"{edit.module}, broken",
                lineterm="",
            )
            parts += lines
        parts.append("")
    return "\n".join(parts)
