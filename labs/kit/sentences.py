"""What a failed `assert` says to whoever does not know pytest."""

import ast
import functools
import linecache
import re
from collections.abc import Mapping, Sequence, Set
from types import TracebackType

COMPARED = (
    "two things were compared"  # the first line of `of_comparison`, which `of_assertion` puts into words
)
LONGEST_VALUE = 200  # characters
LONGEST_NEWS = 40  # characters of a value that is told though a line before has it
MOST_KEYS = 4  # of a dict that differ

_OBJECT = re.compile(r"<(?:[\w.]+\.)?(\w+) object at 0x[0-9a-f]+>")
_METHOD = re.compile(
    r"<(?:built-in method|bound method|built-in function|function) ([\w.]+)(?: of (\w+))?[^<>]*>"
)
_WHERE = re.compile(r"\s*\+\s+(?:where|and) +(.*)")
_NOT_RAISED = re.compile(r"DID NOT RAISE (?:<class '(?:[\w.]*\.)?)?(\w+)(?:'>)?")
_OTHER_TEXT = re.compile(
    r"Regex pattern did not match\.\n\s*Expected regex: (.*)\n\s*Actual message: (.*)", re.DOTALL
)


def of_comparison(op: str, left: object, right: object) -> list[str]:
    """Lines that stand in the place of pytest's for `left op right`; tests write what they have on the left."""
    got, expected = shown(left), shown(right)
    if op in ("==", "is"):
        return [COMPARED, f"expected {expected}", f"got      {got}", *_first(left, right)]
    if op == "in":
        return [COMPARED, f"expected {got}", f"in       {expected}"]
    wanted = {"!=": "anything but", "is not": "anything but", "not in": "nothing that is in"}
    return [COMPARED, f"expected {wanted.get(op, f'a value {op}')} {expected}", f"got      {got}"]


def of_assertion(text: str, traceback: TracebackType | None) -> str:
    """An AssertionError's text, and that of what pytest raises, without pytest's own words.

    A test's own sentence stays, with the values that were compared. Where it has none, the test's code is quoted.
    """
    if found := _NOT_RAISED.fullmatch(text):
        return f"{found[1]} was to be raised here, and nothing was"
    if found := _OTHER_TEXT.search(text):
        return f"the error was to say {found[1].strip()}, and says {found[2].strip()}"
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("assert ")), None)
    if start is None:
        return text
    own, explained = lines[:start], lines[start:]
    compared = [n for n, line in enumerate(explained) if COMPARED in line]
    if not compared:
        reasons = [found[1] for line in explained if (found := _WHERE.match(line))]
        return "\n".join(own or [f"this should hold, and does not: {_quoted(traceback)}", *_told(reasons)])
    is_all = explained[0] == f"assert {COMPARED}"
    what = f"{_quoted(traceback, left=True)} is not what it should be"
    values = _values(explained[compared[-1] + 1 :], " ".join(own))
    return "\n".join(
        [*(own or [what if is_all else f"this should hold, and does not: {_quoted(traceback)}"]), *values]
    )


def _values(lines: list[str], told: str) -> list[str]:
    """What was expected and got, unless both are told already."""
    values = [_without_bracket(line.strip()) for line in lines if not _WHERE.match(line)]
    if all(value.partition(" ")[2].strip() in told for value in values[:2]):
        return []
    return [f"  {value}" for value in values]


def _without_bracket(value: str) -> str:
    """Without the last bracket of an `and` or `or` around the comparison."""
    return value.removesuffix(")") if value.count(")") > value.count("(") else value


def shown(value: object) -> str:
    """A value in one line, cut where it is long."""
    text = clean(" ".join(repr(value).split()))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 4]} ..."


def clean(text: str) -> str:
    """Without addresses: an object is its class, a method its name. Functions of torch are methods of a `type`."""
    text = _OBJECT.sub(r"\1", text)
    return _METHOD.sub(
        lambda found: (
            f"{found[2]}.{found[1]}" if found[2] not in (None, "type") and "." not in found[1] else found[1]
        ),
        text,
    )


def _told(reasons: list[str]) -> list[str]:
    """`False = batch.is_empty` as `batch.is_empty is False`. A long value that was told has no second line."""
    found = (clean(reason) for reason in reasons if "<generator" not in reason and not _METHOD.match(reason))
    told: list[str] = []
    for value, _, what in (reason.partition(" = ") for reason in found):
        is_known = len(value) > LONGEST_NEWS and any(value in line for line in told)
        if what and not is_known:
            told.append(f"  {what} is {value}")
    return told[:2]


def _first(left: object, right: object) -> list[str]:
    """Where two collections differ, when that is not seen at a glance."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = [key for key in dict.fromkeys((*right, *left)) if _at(left, key) != _at(right, key)]
        return [
            f"for {shown(key)}: expected {_at(right, key)}, got {_at(left, key)}" for key in keys[:MOST_KEYS]
        ]
    if isinstance(left, Set) and isinstance(right, Set):
        named = (("lacking", right - left), ("too many", left - right))
        return [f"{what}: {', '.join(sorted(map(shown, items)))}" for what, items in named if items]
    if isinstance(left, Sequence) and isinstance(right, Sequence) and max(len(left), len(right)) > 3:
        if isinstance(left, str) or isinstance(right, str) or left == right:
            return []
        place = next(
            (n for n, pair in enumerate(zip(left, right)) if pair[0] != pair[1]), min(len(left), len(right))
        )
        values = (shown(items[place]) if place < len(items) else "nothing" for items in (right, left))
        return ["the first to differ is number {}: expected {}, got {}".format(place, *values)]
    return []


def _at(mapping: Mapping, key: object) -> str:
    return shown(mapping[key]) if key in mapping else "nothing"


def _quoted(traceback: TracebackType | None, left: bool = False) -> str:
    """What the `assert` that failed has in it; of a comparison what stands on its left, if asked for."""
    while traceback and traceback.tb_next:
        traceback = traceback.tb_next
    if traceback is None:
        return "what the test asks for"
    path, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
    test = next((a.test for a in _asserts(path) if a.lineno <= line <= a.end_lineno), None)
    if test is None:
        return linecache.getline(path, line).strip()
    return ast.unparse(test.left if left and isinstance(test, ast.Compare) else test)


@functools.cache
def _asserts(path: str) -> list[ast.Assert]:
    tree = ast.parse("".join(linecache.getlines(path)))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
