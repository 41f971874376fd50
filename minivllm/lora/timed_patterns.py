"""Regular expressions that an adapter brings. vLLM has none of it: vllm/lora/peft_helper.py drops the patterns."""

import re
import time
from typing import NoReturn

import regex

# A plain name with dots: there is only one way to match it. `re` is quicker with these.
PLAIN_KEY = re.compile(r"\^?(?:\w|-|\.|\\\.)*\$?")

# Seconds of one match at most; and what all matches of an adapter may take, each beyond a usual one's time.
LONGEST_MATCH = 0.1
USUAL_MATCH = 10e-6
LONGEST_EXCESS = 0.25
# Matches of an adapter at most. One with a key that is no plain name counts for eight.
MOST_MATCHES = 2_500_000
COST_OF_OTHERS = 8


class TimedPatterns:
    """`re.match` for the keys of one adapter's patterns. Together they may take a fraction of a second.

    fields   key -> field of the config that has it; `check_fields` has looked at them

    `(.*)*x` may keep `re` busy for years. Plain names go to `re`, everything else to the package `regex`, whose matches
    can be stopped. ValueError names a key that is no regular expression.
    """

    def __init__(self, fields: dict[str, str] | None = None) -> None:
        self._fields = fields or {}
        self._compiled: dict[str, re.Pattern | regex.Pattern] = {}
        self._name, self._found = "", {}
        self._cost = 0
        self._excess = 0.0
        for key, field in self._fields.items():
            try:
                self._compile(rf"(.*\.)?({key})$")
            except (re.error, regex.error, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"{field} has key '{key}', which is no regular expression: {error}"
                ) from error

    def match(self, expression: str, name: str) -> bool:
        """Whether `re.match` finds the expression, with one of the keys in it, at the beginning of the name.

        ValueError names field and key if a match takes too long, or if there are too many.
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
            self._refuse(expression, "one of too many for the modules that the adapter has")
        if is_plain:
            return pattern.match(name) is not None
        started, found = time.thread_time(), None
        try:
            found = pattern.match(name, timeout=LONGEST_MATCH)
        except TimeoutError:
            self._excess += LONGEST_EXCESS
        self._excess += max(0.0, time.thread_time() - started - USUAL_MATCH)
        if self._excess > LONGEST_EXCESS:
            self._refuse(expression, "which takes too long to match; name modules instead")
        return found is not None

    def _compile(self, expression: str) -> re.Pattern | regex.Pattern:
        pattern = re.compile(expression)
        if not PLAIN_KEY.fullmatch(_key_in(expression)):
            pattern = regex.compile(expression)
        self._compiled[expression] = pattern
        return pattern

    def _refuse(self, expression: str, why: str) -> NoReturn:
        key = _key_in(expression)
        raise ValueError(f"{self._fields.get(key, 'a pattern')} has key '{key}', {why}")


def _key_in(expression: str) -> str:
    """The key in an expression of `PEFTHelper._matches`."""
    return expression.removeprefix(r"(.*\.)?(").removesuffix(")$")
