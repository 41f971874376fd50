"""What the course says about an exercise: its track, how long it takes, and three hints."""

import tomllib
from typing import NamedTuple

from labs.kit.regions import ROOT, Exercise, LabError, hint_tables


class Hints(NamedTuple):
    """minutes: for a good engineer to whom this is new; hints: a nudge, the approach, pseudocode

    track: core, on the way to the engine; side, about options; others are the path of one phase (labs.kit.path)

    An exercise's `uses` there are its recipes (labs.kit.regions).
    """

    minutes: int
    hints: list[str]
    track: str = "core"


def hints_of(exercise: Exercise) -> Hints | None:
    """None where nobody has written any. LabError for a file that is not as it should be."""
    path = ROOT / "labs" / exercise.phase / "hints.toml"
    if not path.is_file():
        return None
    try:
        table = hint_tables(path.read_text(encoding="utf-8")).get(exercise.number)
        return table and Hints(table["minutes"], table["hints"], table.get("track", "core"))
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise LabError(f"{path.relative_to(ROOT)}: {error}") from None
