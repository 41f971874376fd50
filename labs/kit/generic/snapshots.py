"""What values are at one time, to be compared with what they are later, or in another process.

A snapshot is flat: path -> what is there, such as `self.tiers.slots[3]` -> `0`.
"""

import array
import ctypes
import functools
import itertools
import re
import sys
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from labs.kit.regions import ROOT
from labs.kit.sentences import clean

MOST_OBJECTS = 20_000  # in one snapshot
MOST_NUMBERS = 1 << 20  # of tensors in one snapshot
SHORT = 8  # elements that are written out
LONGEST = 60  # characters of a value

SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice, type})
PLAIN = (
    *(*SIMPLE, type(...), Path, itertools.count, np.generic, np.dtype),
    *(torch.dtype, torch.device, types.ModuleType, types.CodeType),
)
NUMBERS = (torch.Tensor, np.ndarray)
CONTAINERS = (list, dict, set, frozenset, tuple, deque)
CHANGEABLE = (list, dict, set, deque, bytearray, array.array, *NUMBERS)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)
NOTHING = "nothing"
RESULT = "the result"  # the path of what a call gives, or of the error that it raises
SAME = "the same as "
_OF_NUMPY = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}

_PRIVATE = re.compile(r"\._(?!_|modules\b|parameters\b|buffers\b)")

# path -> a key that is equal where the values are, and words for it; None: the key has them
Snapshot = dict[str, tuple[Any, str | None]]
Seen = dict[int, tuple[str, Any]]  # id -> where an object is, and the object


class TooLarge(Exception):
    """It would take too long to look at all of it."""


class Change(NamedTuple):
    path: str
    before: str
    now: str

    def __str__(self) -> str:
        if self.before == self.now:
            return f"{self.path} ({self.now}) has other numbers than before"
        return f"{self.path}: {self.before} -> {self.now}"

    @property
    def is_private(self) -> bool:
        """Whether an attribute on its path is private. Those in which PyTorch keeps a module's parts are not."""
        return _PRIVATE.search(self.path) is not None

    @property
    def is_of_identity(self) -> bool:
        """Whether it says only that an object is, or is no more, one that is elsewhere too."""
        return any(said.startswith(SAME) for said in (self.before, self.now))


def changes(before: Snapshot, now: Snapshot) -> list[Change]:
    """Where two snapshots differ, in the order of their paths."""
    absent = (None, NOTHING)
    pairs = ((path, before.get(path, absent), now.get(path, absent)) for path in {**before, **now})
    return [Change(path, words_of(old), words_of(new)) for path, old, new in pairs if old[0] != new[0]]


def words_of(entry: tuple[Any, str | None]) -> str:
    """What a snapshot says of one path."""
    key, words = entry
    return _shortened(key[1]) if words is None else words


def snapshot(values: dict[str, Any], deep: bool, in_words: bool = True) -> Snapshot:
    """What the values are, by name, as deep as `objects` goes. TooLarge for those that would take too long."""
    room = MOST_NUMBERS
    found: Snapshot = {}
    for path, value, same_as in objects(values, deep):
        if same_as is not None:
            found[path] = same_as, SAME + same_as
            continue
        kind = type(value)
        if isinstance(value, NUMBERS):
            room -= value.size if isinstance(value, np.ndarray) else value.numel()
            if room < 0:
                raise TooLarge
            key = str(value.dtype), tuple(value.shape), _checksum(value)
        elif kind in SIMPLE or isinstance(value, PLAIN):
            found[path] = (kind.__name__, repr(value)), None  # nearly all that there is: words only if needed
            continue
        elif isinstance(value, CHANGEABLE):
            key = kind.__qualname__, len(value)
        elif deep or is_dataclass(value) or isinstance(value, tuple | frozenset):
            key = kind.__qualname__
        else:
            key = id(value)
        found[path] = key, short(value) if in_words else ""
    return found


def objects(
    values: dict[str, Any], deep: bool, seen: Seen | None = None
) -> Iterator[tuple[str, Any, str | None]]:
    """All that the values consist of: (path, object, path where it was met before or None). Parts follow their whole.

    deep   also what is in objects of any class of the engine's or the tests', and what functions have closed over.
           Else data alone: numbers, texts, tensors, arrays, containers and dataclasses
    seen   objects that count as met before; those that are met here are added
    """
    seen = {} if seen is None else seen
    ahead = list(reversed(values.items()))
    for _ in range(MOST_OBJECTS):
        if not ahead:
            return
        path, value = ahead.pop()
        if type(value) in SIMPLE or isinstance(value, PLAIN):
            yield path, value, None
        elif id(value) in seen:
            yield path, value, seen[id(value)][0]
        else:
            seen[id(value)] = path, value  # held, or another object might be given its id
            yield path, value, None
            if not isinstance(value, NUMBERS):
                ahead += [(path + name, part) for name, part in reversed(_parts(value, deep))]
    raise TooLarge


def _parts(value: Any, deep: bool) -> list[tuple[str, Any]]:
    """What it consists of, by what follows its path. Nothing where nobody looks into it."""
    if isinstance(value, dict):
        parts = _entries(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(f".{name}", item) for name, item in zip(value._fields, value)]
    elif isinstance(value, list | tuple | deque):
        parts = [(f"[{n}]", item) for n, item in enumerate(value)]
    elif isinstance(value, set | frozenset):
        parts = [(f"{{{n}}}", item) for n, item in enumerate(_sorted(value))]
    elif isinstance(value, bytearray | array.array):
        parts = [("", bytes(value))]
    elif not deep:
        names = (field.name for field in fields(value)) if is_dataclass(value) else ()
        return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    elif isinstance(value, FUNCTIONS):
        return _of_function(value)
    else:
        return _attributes(value) if _is_ours(type(value)) else []
    return parts + _attributes(value) if deep and type(value).__module__ != "builtins" else parts


def _entries(value: dict) -> list[tuple[str, Any]]:
    """Only of an `OrderedDict` the order says something."""
    keys = list(value) if isinstance(value, OrderedDict) else _sorted(value)
    entries: dict[str, Any] = {}
    for key in keys:
        name = f"[{short(key)}]"
        entries[name if name not in entries else f"{name} (number {len(entries)})"] = value[key]
    order = [(" in the order of", tuple(map(short, keys)))] if isinstance(value, OrderedDict) else []
    return [*order, *entries.items()]


def _sorted(keys: Collection[Any]) -> list[Any]:
    kinds = {type(key) for key in keys}
    return sorted(keys) if kinds in ({str}, {int}) else sorted(keys, key=short)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    held = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    return [(f".{name}", held[name]) for name in sorted(held)]


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    named = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    names = itertools.chain.from_iterable((n,) if isinstance(n, str) else n for n in named)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _of_function(value: Any) -> list[tuple[str, Any]]:
    """What it has closed over, or whose method it is."""
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if not isinstance(value, types.FunctionType):
        owner = value.__self__
        return [] if owner is None or isinstance(owner, types.ModuleType | type) else [(".__self__", owner)]
    held = []
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        try:
            held.append((f".{name}", cell.cell_contents))
        except ValueError:  # it is empty yet
            continue
    return held


@functools.cache
def _is_ours(kind: type) -> bool:
    """Whether it is a class of the engine's or the tests', or one whose objects are their attributes and no more."""
    if kind.__module__.partition(".")[0] == "minivllm" or issubclass(kind, torch.nn.Module):
        return True
    if kind.__qualname__ in ("SimpleNamespace", "Future"):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and Path(file).is_relative_to(ROOT / "tests")


def _checksum(value: torch.Tensor | np.ndarray) -> int:
    numbers = array_of(value)
    return 0 if numbers is None else zlib.crc32(numbers.tobytes())


def array_of(value: torch.Tensor | np.ndarray) -> np.ndarray | None:
    """The very numbers of a tensor, as an array. None where they are not to be had: on a GPU, or of shapes alone.

    Without an operation of torch's, since tests count these. Of a dtype that NumPy has not it is opaque.
    """
    if isinstance(value, np.ndarray):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
        return None
    if value.layout is not torch.strided or not value.numel():
        return None
    size, storage = value.element_size(), value.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    strides = tuple(size * stride for stride in value.stride())
    kind = str(value.dtype).removeprefix("torch.")
    dtype = kind if kind in _OF_NUMPY else f"V{size}"
    return np.ndarray(tuple(value.shape), dtype, memory, size * value.storage_offset(), strides)


def short(value: Any) -> str:
    """In a few words: of a container what is in it, if that is little, and of an object its class."""
    if type(value) in SIMPLE or isinstance(value, PLAIN):
        return _shortened(repr(value))
    if isinstance(value, NUMBERS):
        return _short_numbers(value)
    if not isinstance(value, CONTAINERS) or hasattr(value, "_fields"):
        return type(value).__name__
    text = _short_items(value) if len(value) <= SHORT else ""
    return text if 0 < len(text) <= LONGEST else f"{type(value).__name__} of {len(value)}"


def _shortened(text: str) -> str:
    text = clean(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _short_items(value: Any) -> str:
    """What is in a container, one step deep."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_short_item(key)}: {_short_item(item)}' for key, item in value.items())}}}"
    items = ", ".join(map(_short_item, value))
    if isinstance(value, set | frozenset):
        return f"{{{items}}}" if items else "set()"
    return f"({items})" if isinstance(value, tuple) else f"[{items}]"


def _short_item(value: Any) -> str:
    if isinstance(value, CONTAINERS):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__ if isinstance(value, NUMBERS) else short(value)


def _short_numbers(value: torch.Tensor | np.ndarray) -> str:
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    numbers = array_of(value)
    if numbers is None or numbers.size > SHORT or numbers.dtype.kind == "V":
        return kind
    return f"{kind} {np.array2string(numbers, precision=4, separator=', ', max_line_width=1000)}"
