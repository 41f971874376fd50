"""Open exercise, phase 09: what came before a token matters no further back than to the last whole character.

So a window is enough: the tokens of the last piece of text, and those after it. It is decoded with and without them;
the difference is new. vLLM does the same (`detokenize_incrementally`).
"""

from collections.abc import Callable


class Detokenizer:
    """Name -> the tokens of the last piece that was given, and those after it."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.windows: dict[int, tuple[list[int], list[int]]] = {}

    def push(self, name: int, token: int) -> str:
        given, new = self.windows.get(name, ([], []))
        new = [*new, token]
        text = self._text(given, new)
        is_whole = not text.endswith("\ufffd")
        self.windows[name] = (new, []) if is_whole else (given, new)
        return text if is_whole else ""

    def finish(self, name: int) -> str:
        given, new = self.windows.pop(name)
        return self._text(given, new) if new else ""

    def _text(self, given: list[int], new: list[int]) -> str:
        """Of the new tokens, where they stand."""
        known = len(self.decode(given)) if given else 0
        return self.decode(given + new)[known:]
