"""How long the sentences of the course's chapters are.

`python tests/helpers/chapter_sentences.py` lists those that are too long. With `--write` it writes how many each
chapter has into chapter_sentences.json: numbers that may only fall.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
DEBT = Path(__file__).with_suffix(".json")
MOST_WORDS = 20

# A sentence may begin with a name in lower case: in backticks, of a file, or of a project.
_END = re.compile(r"(?<=[.!?])[)\"'*]*\s+(?=[\"'(*]*(?:[A-Z…\d]|vLLM|minivllm|\w+\.py))")


def chapters() -> list[Path]:
    return sorted(ROOT.glob("phases/*/README.md"))


def sentences(markdown: str) -> Iterator[str]:
    """Of paragraphs, lists, tables, folded answers. A name in backticks is `…`, one word; blocks of code are none."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "inline":
            text = "".join(map(_as_text, token.children or ()))
            yield from (sentence for sentence in _END.split(text) if sentence.strip())


def _as_text(token: Token) -> str:
    if token.type == "softbreak":
        return " "
    return "…" if token.type == "code_inline" else token.content if token.type == "text" else ""


def words(sentence: str) -> int:
    return sum(bool(re.search(r"[\w…]", word)) for word in sentence.split())


def too_long(path: Path) -> list[str]:
    return [s for s in sentences(path.read_text(encoding="utf-8")) if words(s) > MOST_WORDS]


def counts() -> dict[str, int]:
    """How many of each chapter are too long, of those chapters that have any."""
    found = {path.parent.name: len(too_long(path)) for path in chapters()}
    return {chapter: number for chapter, number in found.items() if number}


if __name__ == "__main__":
    for path in chapters():
        for sentence in too_long(path):
            print(f"{path.parent.name}: {words(sentence)} words: {sentence}")
    if "--write" in sys.argv:
        DEBT.write_text(json.dumps(counts(), indent=1) + "\n", encoding="utf-8")
