"""Regular expressions that an adapter brings. vLLM has none of it: vllm/lora/peft_helper.py drops the patterns."""

import re
import time
from collections.abc import Iterable

import regex

from minivllm.lora.limits import LONGEST_PATTERN, MOST_PATTERNS

# A plain name with dots: there is only one way to match it. `re` is quicker with these.
_PLAIN = re.compile(r"\^?(?:\w|-|\.|\\\.)*\$?")
# A repeated group: `regex` unrolls it while it compiles, and 30 in each other fill all memory. Or a brace that is no
# number of repetitions: `re` takes it for a character, `regex` for the mark of a match that need not be exact.
_UNROLLED = re.compile(r"\)\{|\{(?!\d{0,2},?\d{0,2}\})")
MOST_GROUPS = 6

MOST_OTHER_PATTERNS = 32
# Seconds of one match at most; and what all matches of an adapter may take, each beyond a usual one's time.
LONGEST_MATCH = 0.1
USUAL_MATCH = 10e-6
LONGEST_EXCESS = 0.25
# Matches of an adapter at most. One with a key that is no plain name counts for eight.
MOST_MATCHES = 2_500_000
COST_OF_OTHERS = 8


class TimedPatterns:
    """`re.match` for the keys of one adapter's patterns. Together they may take a fraction of a second.

    `(.*)*x` may keep `re` busy for longer than anybody lives. Plain names go to `re`, everything else to the package
    `regex`, whose matches end in time.
    """

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self._compiled: dict[str, re.Pattern | regex.Pattern] = {}
        self._name, self._found = "", {}
        self._cost = 0
        self._excess = 0.0

    def admit(self, field: str, keys: Iterable[str]) -> None:
        """Take the keys of a field. ValueError names it if there are too many, or a key is too long or intricate."""
        keys = list(keys)
        if len(keys) > MOST_PATTERNS:
            raise ValueError(f"{field} has {len(keys)} entries, at most {MOST_PATTERNS} are read")
        others = [key for key in keys if not _PLAIN.fullmatch(key)]
        for key in keys:
            if len(key) > LONGEST_PATTERN:
                raise ValueError(
                    f"{field} has key '{key[:40]}...' of {len(key)} characters, which is no regular expression that "
                    f"is read: at most {LONGEST_PATTERN} characters"
                )
        for key in others:
            if key.count("(") > MOST_GROUPS or _UNROLLED.search(key):
                raise ValueError(
                    f"{field} has key '{key}', which is no regular expression that is read: at most {MOST_GROUPS} "
                    "groups, and repetitions by number only of single characters and below 100"
                )
        if len(others) > MOST_OTHER_PATTERNS:
            raise ValueError(
                f"{field} has {len(others)} keys that are no plain names, at most {MOST_OTHER_PATTERNS} are read"
            )
        self._fields |= {key: field for key in keys if key not in self._fields}

    def match(self, expression: str, name: str) -> bool:
        """Whether `re.match` finds the expression at the beginning of the name.

        expression   one that holds a key that was admitted

        re.error, OverflowError or RecursionError for what is no regular expression. ValueError names field and key if
        a match takes too long, or if there are too many.
        """
        if self._name != name:
            self._name, self._found = name, {}
        if expression not in self._found:
            self._found[expression] = self._match(expression, name)
        return self._found[expression]

    def _match(self, expression: str, name: str) -> bool:
        pattern = self._compiled.get(expression) or self._compile(expression)
        is_plain = isinstance(pattern, re.Pattern)
        self._cost += 1 if is_plain else COST_OF_OTHERS
        if self._cost > MOST_MATCHES:
            raise ValueError(
                f"{self._owner(expression)}, one of too many for the modules that the adapter has"
            )
        if is_plain:
            return pattern.match(name) is not None
        started, found = time.thread_time(), None
        try:
            found = pattern.match(name, timeout=LONGEST_MATCH)
        except TimeoutError:
            self._excess += LONGEST_EXCESS
        self._excess += max(0.0, time.thread_time() - started - USUAL_MATCH)
        if self._excess > LONGEST_EXCESS:
            raise ValueError(
                f"{self._owner(expression)}, which takes too long to match; name modules instead"
            )
        return found is not None

    def _compile(self, expression: str) -> re.Pattern | regex.Pattern:
        pattern = re.compile(expression)
        if not _PLAIN.fullmatch(_key_in(expression)):
            try:
                pattern = regex.compile(expression)
            except regex.error as error:  # no kin of re.error
                raise re.error(str(error)) from error
        self._compiled[expression] = pattern
        return pattern

    def _owner(self, expression: str) -> str:
        key = _key_in(expression)
        return f"{self._fields.get(key, 'a pattern')} has key '{key}'"


def _key_in(expression: str) -> str:
    """The key in an expression of `PEFTHelper._matches`."""
    return expression.removeprefix(r"(.*\.)?(").removesuffix(")$")
