"""Stop strings in a text that grows. Stands for `check_stop_strings` of vllm/v1/engine/detokenizer.py (v0.22.1).

vLLM searches the last characters for every string at every token. Here each string remembers how much of it the text
ends with (Knuth, Morris and Pratt, SIAM Journal on Computing 6, 1977), so that a token costs its characters, however
long the strings are.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopString:
    """One string, and how far the text's end goes along with it.

    matched   length of the longest end of the text that the string starts with
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * len(
            text
        )  # of each start of the string: its longest end, but itself, that is a start
        for i in range(1, len(text)):
            self._shorter[i] = self._extended(self._shorter[i - 1], text[i])

    @property
    def begun(self) -> int:
        """Length of the longest end of the text that the string starts with and goes on after."""
        return self.matched if self.matched < len(self.text) else self._shorter[-1]

    def take_in(self, character: str) -> bool:
        """The text has grown by a character; whether it ends with the whole string now."""
        self.matched = self._extended(self.begun, character)
        return self.matched == len(self.text)

    def _extended(self, length: int, character: str) -> int:
        """From a start of the string that the text ended with to the one it ends with after another character."""
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
        """The string that is complete first in what the text has grown by; of several at one character the longest.

        may_stop   if not, none counts that is complete by now
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
        """Length of the longest end of the text that may turn out to be the start of a string."""
        return max((string.begun for string in self._strings), default=0)
