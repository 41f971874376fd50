"""How long the sentences of docstrings and comments are."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from code_lines import DOCUMENTED

MOST_WORDS = 30

# A name, or several, and two spaces or more before what is said of it.
_ENTRY = re.compile(r"\S+(?:, \S+)* {2,}(?=\S)")
_QUOTED = re.compile(r"`[^`]*`")
# A sentence may begin with a name in lower case.
_END = re.compile(r"(?<=[.!?])[)\"']*\s+")
_NO_SPEECH = re.compile(r"region|endregion|noqa|type:")


def sentences(text: str) -> Iterator[str]:
    """Of a docstring or a comment. What is said of a name in a list begins a sentence, as a blank line does.

    Names in backticks are one word each, whatever is in them. A semicolon or a colon ends no sentence.
    """
    paragraph: list[str] = []
    for line in (*text.splitlines(), ""):
        entry = _ENTRY.match(line.strip())
        if entry or not line.strip():
            yield from _split(" ".join(paragraph))
            paragraph.clear()
        paragraph.append(line.strip()[entry.end() if entry else 0 :])


def _split(paragraph: str) -> Iterator[str]:
    # Two columns of entries, and shapes after a sentence, are set apart by spaces.
    for piece in re.split(r"\s{2,}", _QUOTED.sub("`…`", paragraph)):
        yield from filter(None, _END.split(piece.strip()))


def words(sentence: str) -> int:
    return sum(bool(re.search(r"[\w…]", word)) for word in sentence.split())


def prose(path: Path) -> Iterator[str]:
    """Docstrings and comments of a file, neighbouring lines of comment together."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring
    last, block = -1, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield "\n".join(block)
                block = []
            said = token.string.lstrip("# ")
            block.append("" if _NO_SPEECH.match(said) else said)
            last = token.start[0]
    yield "\n".join(block)


def long_sentences(path: Path) -> dict[str, int]:
    """How those of a file begin that have more words than they may -> how many words."""
    found = {}
    for text in prose(path):
        for sentence in sentences(text):
            if (number := words(sentence)) > MOST_WORDS:
                found[" ".join(sentence.split()[:8]).replace('"', "'")] = number
    return found
