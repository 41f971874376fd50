"""Open exercise, phase 09: tokens that stand behind a whole character have the same text in every answer.

So it is looked up. What is new is decoded once, behind any piece of text that begins an answer: the words of a
language come again, in this answer and in others.
"""

from collections.abc import Callable


class Detokenizer:
    """known     tokens from one whole character to the next -> their text; whether they begin an answer is in the key
    anchor    tokens that begin an answer and end with a whole character, and the length of their text
    waiting   name -> whether nothing was given yet, and the tokens that have no text yet
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.known: dict[tuple[bool, tuple[int, ...]], str] = {}
        self.anchor: list[int] = []
        self.length = 0
        self.waiting: dict[int, tuple[bool, tuple[int, ...]]] = {}

    def push(self, name: int, token: int) -> str:
        begins, before = self.waiting.get(name, (True, ()))
        tokens = (*before, token)
        text = self._text(begins, tokens)
        is_whole = not text.endswith("\ufffd")
        self.waiting[name] = (False, ()) if is_whole else (begins, tokens)
        if is_whole and not self.anchor:
            self.anchor, self.length = list(tokens), len(text)
        return text if is_whole else ""

    def finish(self, name: int) -> str:
        begins, tokens = self.waiting.pop(name)
        return self._text(begins, tokens) if tokens else ""

    def _text(self, begins: bool, tokens: tuple[int, ...]) -> str:
        """Who does not begin an answer has an anchor: its own beginning, or that of an earlier one."""
        key = begins, tokens
        if key not in self.known:
            text = self.decode([*tokens] if begins else [*self.anchor, *tokens])
            self.known[key] = text if begins else text[self.length :]
        return self.known[key]
