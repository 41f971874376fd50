"""Triton's interpreter, without what it does again and again.

At each call of a kernel, and of each function inside one, it looks through all of `triton.language` for what to
replace, and afterwards it puts the originals back. A third of a test's time went there. What it puts in is the same
each time, and nobody else here uses the language, so here it stays.
"""

import sys
from collections.abc import Callable
from typing import Any


def keep_the_language_replaced() -> None:
    """From now on each module of the language is looked through once a process; nothing where Triton is not loaded."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter and not hasattr(interpreter._patch_lang, "scopes"):
        interpreter._patch_lang = _once(interpreter._patch_lang, (interpreter.tl, interpreter.tl.core))


def _once(replace: Callable[..., Any], languages: tuple[Any, ...]) -> Callable[..., Any]:
    """`replace`, once for each set of modules that a kernel's file names; what it replaced is not put back."""
    scopes: dict[tuple[bool, ...], Any] = {}

    def replace_once(kernel: Callable[..., Any]) -> Any:
        named = [id(value) for value in kernel.__globals__.values()]
        key = tuple(id(language) in named for language in languages)
        if key not in scopes:
            scopes[key] = replace(kernel)
            scopes[key]._changes.clear()
        return scopes[key]

    replace_once.scopes = scopes
    return replace_once
