"""Stop strings in a text that grows. Stands for `check_stop_strings` of vllm/v1/engine/detokenizer.py (v0.22.1).

vLLM searches the last characters for every string at every token. Here each string remembers how much of it the text
ends with. So the cost of a token grows with its characters, not with the strings' length. The method is that of Knuth,
Morris and Pratt (SIAM Journal on Computing 6, 1977). A prefix is a start of the stop string.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopString:
    """One stop string, and how much of it the text ends with.

    matched   length of the longest prefix that the text ends with
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each prefix: the length of the longest shorter prefix that it ends with.
        self._shorter = [0] * len(text)
        for i in range(1, len(text)):
            self._shorter[i] = self._extended(self._shorter[i - 1], text[i])

    @property
    def begun(self) -> int:
        """Length of the longest prefix, but the whole string, that the text ends with."""
        return self.matched if self.matched < len(self.text) else self._shorter[-1]

    def take_in(self, character: str) -> bool:
        """The text has grown by a character; whether it ends with the whole string now."""
        self.matched = self._extended(self.begun, character)
        return self.matched == len(self.text)

    def _extended(self, length: int, character: str) -> int:
        """Length of the longest prefix after another character, if the text ended with one of `length` before it."""
        while length and self.text[length] != character:
            length = self._shorter[length - 1]
        return length + (self.text[length] == character)


class Match(NamedTuple):
    """text[start:end] is the stop string."""

    start: int
    end: int
    string: str


class StopStrings:
    """All stop strings of a request, in one pass through its text."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [StopString(string) for string in strings]
        self._length = 0

    def take_in(self, text: str, may_stop: bool = True) -> Match | None:
        """Add to the text; the stop string that is complete first in `text`, of several at one character the longest.

        may_stop   False: strings that are complete by now do not count
        """
        if not self._strings:
            return None
        for character in text:
            self._length += 1
            complete = [string.text for string in self._strings if string.take_in(character)]
            if complete and may_stop:
                longest = max(complete, key=len)
                return Match(self._length - len(longest), self._length, longest)
        return None

    @property
    def num_begun(self) -> int:
        """Length of the longest end of the text that may yet become a stop string."""
        return max((string.begun for string in self._strings), default=0)
