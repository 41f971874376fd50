"""The core path and what lies beside it: which exercise is on which, how far the learner is, and what comes next.

`track` in labs/NN_name/hints.toml says where an exercise belongs.
"""

from labs.kit.hints import hints_of
from labs.kit.regions import Exercise

TRACKS = {
    "core": "on the core path",
    "kernels": "on the kernel path",
    "serving": "on the serving path",
    "policies": "on the policy path",
    "ranks": "on the parallel path",
    "variants": "on the variant path",
    "versions": "on the learning path",
    "side": "on side tracks",
}
MARKS = {"side": "  (side track)"}  # behind a title


def track_of(exercise: Exercise) -> str:
    """One of `TRACKS`; core where nobody has described the exercise yet."""
    hints = hints_of(exercise)
    return hints.track if hints else "core"


def mark(exercise: Exercise) -> str:
    return MARKS.get(track_of(exercise), "")


def label(track: str) -> str:
    """What a path is called: "core path", "side tracks"."""
    return TRACKS[track].removeprefix("on ").removeprefix("the ")


def named(exercise: Exercise) -> str:
    """The exercise as it is proposed: number, title, whether it is beside the path, minutes."""
    hints = hints_of(exercise)
    minutes = f", about {hints.minutes} minutes" if hints else ""
    return f"lab {exercise.number}, {exercise.title}{mark(exercise)}{minutes}"


def is_needed(exercise: Exercise) -> bool:
    """Whether its phase is not done without it: side tracks may be left alone."""
    return track_of(exercise) != "side"


def counts(states: list[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    """Track -> (how many are solved, how many there are).   states: (track, whether solved) of every exercise"""
    found = {}
    for name in TRACKS:
        solved = [is_solved for track, is_solved in states if track == name]
        if solved:
            found[name] = sum(solved), len(solved)
    return found


def next_of(exercises: list[Exercise], states: dict[str, str], last: str | None) -> Exercise | None:
    """What to do next on the learner's own path: what was begun, else what follows the last pass on that path.

    states   number -> as `Progress.state` says    last   the exercise that passed last

    The path is the core's, and the other tracks of phases in which something of them was begun or solved. None when
    all of it is solved.
    """
    track = {e.number: track_of(e) for e in exercises}
    chosen = {(e.phase, track[e.number]) for e in exercises if states[e.number] != "todo"}
    numbers = [exercise.number for exercise in exercises]
    at = numbers.index(last) + 1 if last in numbers else 0
    ahead = [e for e in exercises[at:] + exercises[:at] if states[e.number] != "passed"]
    begun = [e for e in exercises if states[e.number] == "started"]
    own = [e for e in ahead if track[e.number] == "core" or (e.phase, track[e.number]) in chosen]
    return next(iter(begun + own), None)
