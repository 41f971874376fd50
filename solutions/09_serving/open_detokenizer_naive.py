"""Open exercise, phase 09: the text of answers while their tokens come. `lab open 9` judges it.

24 answers of some 200 tokens are streamed at the same time. A token is some bytes: a word, a part of one, or a part of
a character. So the text of several tokens is more than the texts of each: characters come together, and only the first
word of a text loses the space before it.

Budget: `decode` is given at most 4 tokens for each token of the answers. This one asks for everything again each time.
"""

from collections.abc import Callable


class Detokenizer:
    """The text of many answers, each known by its name.

    decode   token ids -> their text, as a tokenizer has it. Bytes that are no whole character are "\ufffd"
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.tokens: dict[int, list[int]] = {}
        self.given: dict[int, int] = {}  # characters

    def push(self, name: int, token: int) -> str:
        """The text that an answer's next token adds.

        Nothing while the text of all its tokens so far ends in "\ufffd": later tokens may make a character of it. Else
        all that was not given yet.
        """
        tokens = self.tokens.setdefault(name, [])
        tokens.append(token)
        text = self.decode(tokens)
        return "" if text.endswith("\ufffd") else self._rest(name, text)

    def finish(self, name: int) -> str:
        """What is left of an answer that has ended."""
        return self._rest(name, self.decode(self.tokens.pop(name)))

    def _rest(self, name: int, text: str) -> str:
        known = self.given.get(name, 0)
        self.given[name] = len(text)
        return text[known:]
