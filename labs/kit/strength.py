"""How much of what is changed in an exercise's code its own tests see."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from labs.kit.forks import Job, Outcome, run
from labs.kit.in_place import run_changes
from labs.kit.mutations import Mutation, mutations_of
from labs.kit.overlay import Source, engine_file
from labs.kit.regions import ROOT, Exercise, LabError

WANTED = 0.95  # of a phase's changes that are not equivalent
SAMPLE_WANTED = 0.9  # of a few changes of all phases: a seldom one must not fail whoever moved a line
OF_A_KERNEL = 60  # changes that are tried of an exercise that Triton's interpreter runs: each takes seconds
INTERPRETED = ("4.2", "4.3")
AT_A_TIME = 2
SHORTEST = 5.0  # seconds, the least limit of a change's tests


class Equivalent(NamedTuple):
    """A change after which the code does the same, as `equivalent.toml` names it."""

    function: str
    old: str
    new: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.function, self.old, self.new


class Strength(NamedTuple):
    """What became of the changes of one exercise.

    tried, killed   how many; equivalents do not count
    survived        whom no test sees
    wrong           sentences about entries of `equivalent.toml` that are none, and about tests that fail as they are
    """

    exercise: Exercise
    tried: int
    killed: int
    survived: list[Mutation]
    wrong: list[str]


def equivalents_of(exercise: Exercise) -> list[Equivalent]:
    """In the order of their file. LabError for a file that is not as it should be."""
    path = ROOT / "labs" / exercise.phase / "equivalent.toml"
    if not path.is_file():
        return []
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get(exercise.number, [])
        return [
            Equivalent(e["function"], e["old"].strip("\n"), e["new"].strip("\n"), e["reason"])
            for e in entries
        ]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise LabError(f"{path.relative_to(ROOT)}: {error}") from None


def measure(exercises: Iterable[Exercise], at_most: int | None = None) -> Iterator[Strength]:
    """Run each exercise's tests on its changes.

    at_most   so many changes of each exercise, none of them equivalent. None: all, and all that count as equivalent;
              of kernels `OF_A_KERNEL`
    """
    for exercise in exercises:
        entries = {entry.key for entry in equivalents_of(exercise)}
        if at_most is not None:
            # Room for equivalents, which do not count: whatever they are, so many remain.
            few = mutations_of(exercise, at_most + len(entries))
            yield _judge(exercise, [m for m in few if m.key not in entries][:at_most], set(), SHORTEST)
            continue
        mutations = mutations_of(exercise)
        unknown = [_sentence(key, "is no change of the code") for key in entries - {m.key for m in mutations}]
        if exercise.number in INTERPRETED:
            listed = [m for m in mutations if m.key in entries]
            few = mutations_of(exercise, OF_A_KERNEL + len(entries))
            mutations = [m for m in few if m.key not in entries][:OF_A_KERNEL] + listed
        [(_, engine)] = run([Job(None, exercise.number, {})])
        if not engine.passed:
            unknown.append("its tests fail on the engine")
        strength = _judge(exercise, mutations, entries, max(SHORTEST, 5 * engine.seconds))
        yield strength._replace(wrong=unknown + strength.wrong)


def _judge(exercise: Exercise, mutations: list[Mutation], entries: set[tuple], limit: float) -> Strength:
    jobs = [Job(mutation, exercise.number, _sources(mutation), stop_at_first=True) for mutation in mutations]
    survived, wrong, killed = [], [], 0
    for job, outcome in run_changes(jobs, limit=limit, at_a_time=AT_A_TIME):
        is_seen, is_listed = _is_killed(outcome), job.key.key in entries
        if is_seen and is_listed:
            wrong.append(_sentence(job.key.key, "is not equivalent: a test sees it"))
        killed += is_seen and not is_listed
        if not is_seen and not is_listed:
            survived.append(job.key)
    tried = sum(mutation.key not in entries for mutation in mutations)
    return Strength(exercise, tried, killed, sorted(survived), wrong)


def _is_killed(outcome: Outcome) -> bool:
    """Whether a test failed, or the tests did not come to an end."""
    return bool(outcome.trouble or outcome.of("failed"))


def _sources(mutation: Mutation) -> dict[str, Source]:
    module = mutation.exercise.module
    return {module: Source(f"{engine_file(module)} [changed]", mutation.text)}


def _sentence(key: tuple[str, str, str], what: str) -> str:
    function, old, new = key
    return f"equivalent.toml: in {function}, '{old}' to '{new}' {what}"


def by_phase(strengths: Iterable[Strength]) -> dict[str, tuple[int, int]]:
    """Phase -> changes killed, changes tried."""
    killed, tried = Counter[str](), Counter[str]()
    for strength in strengths:
        killed[strength.exercise.phase] += strength.killed
        tried[strength.exercise.phase] += strength.tried
    return {phase: (killed[phase], tried[phase]) for phase in tried}


def is_strong(strengths: list[Strength], sample: bool = False) -> bool:
    """Whether each phase's tests see enough, of a sample all phases' together, and what counts as equivalent is."""
    if any(strength.wrong for strength in strengths):
        return False
    if sample:
        return sum(s.killed for s in strengths) >= SAMPLE_WANTED * sum(s.tried for s in strengths)
    return all(killed >= WANTED * tried for killed, tried in by_phase(strengths).values())
