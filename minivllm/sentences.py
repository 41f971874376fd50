"""What people read when something is refused: one sentence, made safe to print. vllm/lora/ quotes names as they are."""

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

LONGEST_SENTENCE = 500  # characters: what a log line, a terminal and a JSON answer take without harm
LONGEST_NAME = 80  # of a name in a sentence about something else

REFUSALS = (ValueError, FileNotFoundError, RuntimeError)

P, R = ParamSpec("P"), TypeVar("R")


def one_sentence(text: object, longest: int = LONGEST_SENTENCE) -> str:
    """The text in one line without control characters, of at most `longest` characters.

    Line ends become spaces. Other characters that cannot be printed, such as lone surrogates, become their escapes. Of
    a longer text the middle is left out: the beginning names the thing, the end says what to do.
    """
    text = _cut(str(text), 4 * longest)  # to go through megabytes would take seconds
    text = " ".join(text.split()) if any(end in text for end in "\n\r\t\v\f") else text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _cut("".join(shown), longest)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head = (longest - 5) // 2
    return f"{text[:head]} ... {text[head + 5 - longest :]}"


def in_one_sentence(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose refusals (REFUSALS) have one sentence, see `raise_in_one_sentence`."""

    @functools.wraps(function)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except REFUSALS as error:
            raise_in_one_sentence(error)

    return refusing


def raise_in_one_sentence(error: Exception) -> NoReturn:
    """Raise one of REFUSALS again, with a text that is one sentence (`one_sentence`)."""
    text = one_sentence(error)
    if text == str(error):
        raise error
    kinds = (kind for kind in (FileNotFoundError, RuntimeError) if isinstance(error, kind))
    raise next(kinds, ValueError)(text) from error
