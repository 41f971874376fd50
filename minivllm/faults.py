"""Which errors are one request's, one adapter's or one step's own, so that the engine outlives them.

vLLM 0.22.1 has no such rule: what a step raises ends its `EngineCore`.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minivllm.labs import LabError, Todo

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine has ended, and with it every request. vLLM: the same name, in vllm/v1/engine/exceptions.py."""


class Refusal(ValueError):
    """Raised on purpose, before anything has changed: a ValueError of a narrower kind, for who tells kinds apart."""


class RuntimeRefusal(RuntimeError):
    """As `Refusal`, where callers expect a RuntimeError: what is asked for is right, and cannot be done now."""


def is_fault(error: BaseException) -> bool:
    """Whether an error may be put down to the request, the adapter or the step that raised it.

    Not so: Ctrl-C, an exit, a task that was cancelled, the engine's end, and an exercise that nobody has solved yet.
    A panic in one of the Rust libraries (tokenizers, safetensors) is a fault, although pyo3 derives it from
    BaseException.
    """
    if isinstance(error, Todo | LabError | EngineDeadError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def as_fault(error: BaseException) -> BaseException:
    """The error, to be kept and told; raised again if it is no fault."""
    if not is_fault(error):
        raise error
    return error


def is_expected(error: BaseException) -> bool:
    """Whether the engine itself raises errors of this kind, with a sentence that says what to do."""
    return isinstance(error, ValueError | OSError | RuntimeError)


def is_refusal(error: BaseException) -> bool:
    """Whether it is what the engine raises on purpose.

    A plain RuntimeError is not: PyTorch raises it wherever memory is short, also in the middle of a change.
    """
    refusals = OSError | Refusal | RuntimeRefusal
    return type(error) in (TypeError, ValueError) or isinstance(error, refusals)


def reason(error: BaseException) -> str:
    """What people are told of an error."""
    if is_expected(error) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def told(error: BaseException, request_ids: Sequence[str]) -> str:
    """`reason`, for the requests that end with the error. One that nobody foresaw goes into the log, too."""
    if not is_expected(error):
        logger.error("requests %s end with an error that nobody foresaw", request_ids, exc_info=error)
    return reason(error)


@contextmanager
def put_down_to(adapter_id: int) -> Iterator[None]:
    """Note in whatever is raised inside that this adapter raised it. `adapter_at_fault` reads the note."""
    try:
        yield
    except BaseException as error:
        error.adapter_id = adapter_id
        raise


def adapter_at_fault(error: BaseException) -> int:
    """The id of the adapter that raised an error, 0 if none did or nobody knows."""
    return getattr(error, "adapter_id", 0)
