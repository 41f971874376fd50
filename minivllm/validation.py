"""What an option or a parameter must be, in one style: a ValueError names it and shows what it was."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

LARGEST_INT = 2**63 - 1  # counts end up in int64 tensors
# What nearly all are comes first: abstract classes take longer to ask.
INTEGRAL, REAL = (int, Integral), (float, int, Real)


def require_int(smallest: int, **values: object) -> None:
    """ValueError for a value that is no int, is below `smallest`, or is above LARGEST_INT."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} must be an int of at least {smallest}, got {shown(value)}")
        require_count(name, value)


def require_at_most(largest: int, **values: int) -> None:
    """ValueError for a value above `largest`."""
    for name, value in values.items():
        if value > largest:
            raise ValueError(f"{name} must be at most {largest}, got {shown(value)}")


def require_count(name: str, value: int) -> None:
    """ValueError for an int that no int64 tensor holds."""
    require_at_most(LARGEST_INT, **{name: value})


def require_bool(**values: object) -> None:
    """ValueError for a value that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {shown(value)}")


def require_text(**values: object) -> None:
    """ValueError for a value that is no text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {shown(value)}")


def require_kind(kind: Any, **values: object) -> None:
    """TypeError for a value of another kind: a class, or several as in `str | None`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {getattr(kind, '__name__', kind)}, got {shown(value)}")


def require_one_of(known: Sequence[str], **values: object) -> None:
    """ValueError for a value that is none of these names."""
    for name, value in values.items():
        if value not in known:
            raise ValueError(f"unknown {name} {shown(value)}; use one of {', '.join(known)}")


def is_integral(value: Any) -> bool:
    """Whether it is a whole number, of whatever type; a bool is none."""
    return isinstance(value, INTEGRAL) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether it is a number with an order, of whatever type; a bool is none."""
    return isinstance(value, REAL) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float holds, and neither infinite nor NaN; a bool is none."""
    try:
        return is_real(value) and math.isfinite(value)
    except OverflowError:  # an int of too many digits
        return False


def is_list_of_names(names: Any) -> bool:
    """Whether it is a list, or the like, of texts and nothing else."""
    return isinstance(names, list | tuple | set | frozenset) and all(isinstance(name, str) for name in names)


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; no error for a name that no file system takes."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def shown(value: Any, longest: int = 80) -> str:
    """A value as an error shows it: what a caller gave may be as long as a book, or not be shown at all."""
    try:
        text = repr(value)
    except Exception as error:  # an int of more digits than Python writes out, or somebody's own __repr__
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def for_each(value: Any, count: int, name: str) -> list[Any]:
    """One value for all prompts, or a list with one each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for all or one each")
    return list(value)
