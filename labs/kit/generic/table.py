"""What bodies may do although a generic check would refuse it: `table.toml`, a line for each, with its reason."""

import tomllib
from functools import cache
from pathlib import Path

from labs.kit.generic.watching import Call

FILE = Path(__file__).with_name("table.toml")


class Table:
    """Of one exercise."""

    def __init__(self, exercise: str) -> None:
        self.exercise = exercise
        self.entries = read()

    def allows(self, kind: str, call: Call, *more: str) -> bool:
        """Whether the section `kind` has the call's function, and what else its lines name."""
        return (self.exercise, call.watched.name, *more) in self.entries.get(kind, {})


@cache
def read() -> dict[str, dict[tuple[str, ...], str]]:
    """Section -> (exercise, function, ...) -> reason."""
    sections = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: {tuple(key.split()): why for key, why in lines.items()} for name, lines in sections.items()}
