"""The kinds of errors, whose fault one is, and the sentence that people read.

vLLM (v0.22.1) has EngineDeadError in vllm/v1/engine/exceptions.py; what else a step raises there ends its `EngineCore`.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

LONGEST_SENTENCE = 500  # characters: what a log line, a terminal and a JSON answer take without harm
LONGEST_NAME = 80  # of a name in a sentence about something else

REFUSALS = (ValueError, FileNotFoundError, RuntimeError)

P, R = ParamSpec("P"), TypeVar("R")

LARGEST_INT = 2**63 - 1  # counts end up in int64 tensors
# What nearly all are comes first: abstract classes take longer to ask.
INTEGRAL, REAL = (int, Integral), (float, int, Real)


class EngineDeadError(RuntimeError):
    """The engine has ended, and with it every request. vLLM: the same name, in vllm/v1/engine/exceptions.py."""


def died_of(error: BaseException) -> EngineDeadError:
    """What everybody is told who waits for an engine that this error ended."""
    if isinstance(error, EngineDeadError):
        return error
    dead = EngineDeadError(f"the engine has ended: {message_of(error)}; start another one")
    dead.__cause__ = error
    return dead


class Refusal(ValueError):
    """Raised on purpose, before anything has changed: a ValueError of a narrower kind, for who tells kinds apart."""


class RuntimeRefusal(RuntimeError):
    """As `Refusal`, where callers expect a RuntimeError: what is asked for is right, and cannot be done now."""


class AllPinned(Refusal):
    """An adapter can have no slot, since all are pinned for others: when one is unpinned, the answer is another one."""


class IsLeaving(Refusal):
    """An adapter is being unloaded: when it is gone, the answer is another one."""


def all_pinned(lora_name: str, num_pinned: int) -> AllPinned:
    """For a request whose adapter can have no slot. A client may not know of any adapter but its own: none is named."""
    return AllPinned(
        f"adapter '{lora_name}' needs a slot but all {num_pinned} are pinned for others; unpin one or raise max_loras"
    )


def is_leaving(lora_name: str, adapter_id: int) -> IsLeaving:
    """For who names an adapter that is being unloaded."""
    return IsLeaving(f"adapter '{lora_name}' (id {adapter_id}) is being unloaded; ask again when it is gone")


def id_in_use(request_id: str) -> ValueError:
    """For a request with the id of another one that has not had its last output."""
    return ValueError(f"request id '{request_id}' is in use; give every request its own")


def lora_is_off(request_id: str, lora_name: str) -> ValueError:
    """For a request that names an adapter to an engine without LoRA."""
    return ValueError(
        f"request '{request_id}' names adapter '{lora_name}' but LoRA is off; start the engine with enable_lora=True"
    )


# ---- whose an error is ----------------------------------------------------------------------------------------


def is_recoverable(error: BaseException) -> bool:
    """Whether an error ends the request, the adapter or the step that raised it, and the engine goes on.

    Not so: Ctrl-C, an exit, a task that was cancelled, the engine's end, and code that nobody has written yet.
    A panic in one of the Rust libraries (tokenizers, safetensors) is recoverable, although pyo3 derives it from
    BaseException.
    """
    if isinstance(error, NotImplementedError | EngineDeadError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def recoverable(error: BaseException) -> BaseException:
    """Give the error back, for a caller that keeps or reports it. One that is not recoverable is raised instead."""
    if not is_recoverable(error):
        raise error
    return error


def is_expected(error: BaseException) -> bool:
    """Whether the engine itself raises errors of this kind, with a sentence that says what to do."""
    return isinstance(error, ValueError | OSError | RuntimeError) and not isinstance(
        error, NotImplementedError
    )


def message_of(error: BaseException) -> str:
    """An error's text; for one that the engine did not raise on purpose, with the name of its class."""
    if is_expected(error) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def log_unexpected(error: BaseException, request_ids: Sequence[str]) -> str:
    """`message_of`, for the requests that end with the error. One that nobody foresaw goes into the log, too."""
    if not is_expected(error):
        logger.error("requests %s end with an error that nobody foresaw", request_ids, exc_info=error)
    return message_of(error)


@contextmanager
def blamed_on(adapter_id: int) -> Iterator[None]:
    """Note in whatever is raised inside that this adapter raised it. `blamed_adapter` reads the note."""
    try:
        yield
    except BaseException as error:
        error.adapter_id = adapter_id
        raise


def blamed_adapter(error: BaseException) -> int:
    """The id of the adapter that raised an error, 0 if none did or nobody knows."""
    return getattr(error, "adapter_id", 0)


# ---- one sentence ---------------------------------------------------------------------------------------------


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


# ---- what an option or a parameter must be: a ValueError names it and shows what it was -----------------------


def require_int(smallest: int, **values: object) -> None:
    """ValueError for a value that is no int, is below `smallest`, or is above LARGEST_INT."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} must be an int of at least {smallest}, got {shown(value)}")
        require_count(name, value)


def require_at_most(largest: int, **values: int) -> None:
    """ValueError for a value above `largest`."""
    for name, value in values.items():
        if value > largest:
            raise ValueError(f"{name} must be at most {largest}, got {shown(value)}")


def require_count(name: str, value: int) -> None:
    """ValueError for an int that no int64 tensor holds."""
    require_at_most(LARGEST_INT, **{name: value})


def require_bool(**values: object) -> None:
    """ValueError for a value that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {shown(value)}")


def require_text(**values: object) -> None:
    """ValueError for a value that is no text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {shown(value)}")


def require_kind(kind: Any, **values: object) -> None:
    """TypeError for a value of another kind: a class, or several as in `str | None`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {getattr(kind, '__name__', kind)}, got {shown(value)}")


def require_one_of(known: Sequence[str], **values: object) -> None:
    """ValueError for a value that is none of these names."""
    for name, value in values.items():
        if value not in known:
            raise ValueError(f"unknown {name} {shown(value)}; use one of {', '.join(known)}")


def is_integral(value: Any) -> bool:
    """Whether it is a whole number, of whatever type; a bool is none."""
    return isinstance(value, INTEGRAL) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether it is a number with an order, of whatever type; a bool is none."""
    return isinstance(value, REAL) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float holds, and neither infinite nor NaN; a bool is none."""
    try:
        return is_real(value) and math.isfinite(value)
    except OverflowError:  # an int of too many digits
        return False


def is_list_of_names(names: Any) -> bool:
    """Whether it is a list, or the like, of texts and nothing else."""
    return isinstance(names, list | tuple | set | frozenset) and all(isinstance(name, str) for name in names)


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; no error for a name that no file system takes."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def shown(value: Any, longest: int = 80) -> str:
    """A value as an error shows it: what a caller gave may be as long as a book, or not be shown at all."""
    try:
        text = repr(value)
    except Exception as error:  # an int of more digits than Python writes out, or somebody's own __repr__
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def for_each(value: Any, count: int, name: str) -> list[Any]:
    """One value for all prompts, or a list with one each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for all or one each")
    return list(value)
