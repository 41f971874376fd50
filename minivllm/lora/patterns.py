"""Regular expressions that an adapter brings. vLLM has none of it: vllm/lora/peft_helper.py drops the patterns.

Some expressions, such as `(.*)*x`, keep `re` busy for years. RE2 reads a name once, whatever the expression, so that
the length of a match is known beforehand. What RE2 cannot read, such as look-arounds, is refused.
"""

import re

import re2

# A plain name with dots: there is only one way to match it. `re` is six times as quick with these.
PLAIN_KEY = re.compile(r"\^?(?:\w|-|\.|\\\.)*\$?")
# What RE2 takes for something else than `re` does: at most n repetitions, a class by its name, and no boundary of words
# where the text is empty. Of names, which are ASCII in all models, all else is the same.
_READ_OTHERWISE = re.compile(r"\{,|\[:|\\B")

# Bytes of an expression and of what RE2 notes of it.
MOST_MEMORY = 2**18
# What all matches of an adapter may cost. A plain name's is 1, and 0.4 µs; 400 bytes by operations of RE2 are another.
MOST_COST = 1_500_000
STEPS = 400


class Patterns:
    """`re.match` for the keys of one adapter's patterns. Together they may take a second.

    fields   key -> field of the config that has it; `PEFTHelper` has looked at them

    ValueError names a key that is no regular expression, or none that RE2 reads.
    """

    def __init__(self, fields: dict[str, str] | None = None) -> None:
        self._fields = fields or {}
        self._compiled: dict[str, re.Pattern | re2._Regexp] = {}
        self._name, self._found = "", {}
        self._cost = 0
        for key in self._fields:
            self._compile(rf"(.*\.)?({key})$")

    def match(self, expression: str, name: str) -> bool:
        """Whether `re.match` finds the expression, with one of the keys in it, at the beginning of the name.

        ValueError names field and key once the adapter's matches cost too much.
        """
        if self._name != name:
            self._name, self._found = name, {}
        if expression not in self._found:
            self._found[expression] = self._match(expression, name)
        return self._found[expression]

    def _match(self, expression: str, name: str) -> bool:
        pattern = self._compiled.get(expression) or self._compile(expression)
        is_plain = isinstance(pattern, re.Pattern)
        text = name if is_plain else name.encode(errors="replace")
        self._cost += 1 if is_plain else 2 + pattern.programsize * len(text) // STEPS
        if self._cost > MOST_COST:
            why = "takes too long to match with all modules of the adapter; name modules instead"
            raise ValueError(f"{self._described(expression)}, which {why}")
        return pattern.match(text) is not None

    def _compile(self, expression: str) -> "re.Pattern | re2._Regexp":
        if _READ_OTHERWISE.search(expression):
            raise ValueError(f"{self._described(expression)}, which RE2 reads otherwise than Python")
        try:
            pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{self._described(expression)}, which is no regular expression: {error}"
            ) from error
        if not PLAIN_KEY.fullmatch(_key_in(expression)):
            options = re2.Options()
            options.max_mem, options.never_capture, options.log_errors = MOST_MEMORY, True, False
            try:
                pattern = re2.compile(expression.encode(errors="replace"), options)
            except re2.error as error:
                why = error.args[0].decode(errors="replace")
                raise ValueError(f"{self._described(expression)}, which RE2 cannot read: {why}") from error
        self._compiled[expression] = pattern
        return pattern

    def _described(self, expression: str) -> str:
        key = _key_in(expression)
        return f"{self._fields.get(key, 'a pattern')} has key '{key}'"


def _key_in(expression: str) -> str:
    """The key in an expression of `PEFTHelper._matches`."""
    return expression.removeprefix(r"(.*\.)?(").removesuffix(")$")
