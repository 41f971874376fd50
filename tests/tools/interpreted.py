"""Triton's interpreter, with less to do.

At each call of a kernel, and of each function inside one, it looks through all of `triton.language` for what to
replace, and afterwards it puts the originals back. A third of a test's time went there. What it puts in is the same
each time, and nobody else here uses the language, so here it stays.

For each number or block that an operation gives, it makes a type and a shape anew, and looks up numpy's type in a
table that it writes for that. Few types and shapes occur, so they are kept. And after each sum and product of whole
numbers it asks in five more operations whether the result fits, and tells nobody. Half of what was left went there.
What two blocks of one type and shape must become before they are added is found without a search: themselves.

Another Triton may lack a name that is replaced here. Then its interpreter stays as slow as it is.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

# What is replaced here, or asked for it, from the interpreter's module on.
NAMES = (
    *("_patch_lang", "_LangPatchScope", "_get_np_dtype", "tl.core.block_type", "tl.core.tensor"),
    *("interpreter_builder.options.debug", "interpreter_builder.options.sanitize_overflow"),
    *("interpreter_semantic.binary_op_type_checking_impl", "interpreter_semantic.broadcast_impl_value"),
)


def keep_the_language_replaced() -> None:
    """Call it when Triton is imported; again is no harm."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter and not hasattr(interpreter, "has_less_to_do"):
        interpreter.has_less_to_do = all(_has(interpreter, name) for name in NAMES)
        if interpreter.has_less_to_do:
            _replace_once(interpreter)
            _keep_types(interpreter)
            _leave_what_is_alike(interpreter.interpreter_semantic, interpreter.tl.core.tensor)
            _tell_nobody(interpreter.interpreter_builder)


def _has(owner: Any, name: str) -> bool:
    """name: with dots"""
    first, _, rest = name.partition(".")
    return hasattr(owner, first) and (not rest or _has(getattr(owner, first), rest))


def _replace_once(interpreter: Any) -> None:
    """The language, once for each set of modules that a kernel's file names; what it replaced is not put back."""
    exchange: Callable[..., Any] = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    exchanged: set[tuple[bool, ...]] = set()
    files: dict[int, Any] = {}  # kept, so that no other gets the id of one
    nothing_to_put_back = interpreter._LangPatchScope()

    def exchange_once(kernel: Callable[..., Any]) -> Any:
        names = kernel.__globals__
        if id(names) not in files:
            files[id(names)] = names
            named = [id(value) for value in names.values()]
            key = tuple(id(language) in named for language in languages)
            if key not in exchanged:
                exchanged.add(key)
                exchange(kernel)
        return nothing_to_put_back

    interpreter._patch_lang = exchange_once


def _keep_types(interpreter: Any) -> None:
    """Types of blocks, the shapes of what has a type, and numpy's types are made once."""
    core = interpreter.tl.core
    make_type, make_tensor, numpys = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    # By names: not every type can be hashed, and 16.0, which is no size, equals 16.
    types: dict[str, dict[str, Any]] = {}
    of_scalars: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = f"{element_ty}{shape}"
        if key not in types:
            make_type(self, element_ty, shape)
            init_tensor(core.tensor.__new__(core.tensor), None, self)
            types[key] = vars(self)
            self.sizes = list(self.shape)
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in vars(type):
            make_tensor(self, None, type)
            type.of_tensors = dict(vars(self))
        vars(self).update(type.of_tensors, handle=handle, type=type)

    def numpys_type(of: Any) -> Any:
        name = str(of.scalar)
        if name not in of_scalars:
            of_scalars[name] = numpys(of)
        return of_scalars[name]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = numpys_type


def _leave_what_is_alike(semantic: Any, tensor: type) -> None:
    """Two of one type and shape are what they become; of what are not alike the interpreter sees to that."""
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def check_types(lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        """options: at most two, of pointers, unless it is for a division"""
        alike = type(lhs) is tensor and type(rhs) is tensor and lhs.dtype is rhs.dtype
        if alike and len(options) < 3 and not named and not lhs.dtype.is_ptr():
            return broadcast_unlike(lhs, rhs)
        return check(lhs, rhs, *options, **named)

    def broadcast_unlike(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        ours, theirs = vars(lhs.type).get("sizes"), vars(rhs.type).get("sizes")
        return (lhs, rhs) if ours and ours == theirs else broadcast(lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_types, broadcast_unlike


def _tell_nobody(builder: Any) -> None:
    """Of whole numbers that do not fit; only who debugs is told."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
