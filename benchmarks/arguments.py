"""What options are read by, without PyTorch: nonsense is refused before anything is loaded, with what there is."""

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

SHAPES = Path(__file__).resolve().parent / "shapes"
SHAPE_NAMES = tuple(sorted(path.name for path in SHAPES.iterdir()))
DTYPES = ("auto", "float32", "float", "float64", "double", "bfloat16", "float16", "half")
LAYER_DTYPES = ("float32", "float64", "bfloat16", "float16")
BACKENDS = ("auto", "loops", "grouped", "triton", "paged", "invariant")
EVICTION_POLICIES = ("lru", "lfu", "gdsf")
SCHEDULING_POLICIES = ("fcfs", "adapter-affine", "rank-aware", "shortest-first", "fair")
# How the name of a case ends whose adapters are no plain ones.
DORA, MIX = "-dora", "-mix"
MIXES = ("uniform", "zipf", "half", "ranks")
LARGEST = 10**9

T = TypeVar("T")


def whole(low: int = 1, high: int = LARGEST) -> Callable[[str], int]:
    """Reads a whole number from `low` to `high`."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            up_to = f" to {high}" if high < LARGEST else " or more"
            raise ArgumentTypeError(f"'{text}' is not a whole number, {low}{up_to}")
        return int(text)

    return read


def number(low: float = 0.0, above: bool = False) -> Callable[[str], float]:
    """Reads a finite number of at least `low`, or above it."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (above and value == low):
            raise ArgumentTypeError(f"'{text}' is not a number {'above' if above else 'of at least'} {low:g}")
        return value

    return read


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Reads one of these names."""

    def read(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"there is no '{text}'; use one of {', '.join(known)}")
        return text

    return read


def each_once(read_one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Reads a list with commas between, each entry by `read_one`."""

    def read(text: str) -> list[T]:
        parts = [part.strip() for part in text.split(",")]
        if "" in parts:
            raise ArgumentTypeError(f"'{text}' has an empty entry; write it like a,b with commas between")
        values = [read_one(part) for part in parts]
        if twice := [value for place, value in enumerate(values) if value in values[:place]]:
            raise ArgumentTypeError(f"'{twice[0]}' is named twice in '{text}'")
        return values

    return read


def decode_case(text: str) -> str:
    """ "base", "none", a number of adapters, or one of DoRA adapters or mixes of two as in 8-dora, 8-mix."""
    count = text.removesuffix(DORA).removesuffix(MIX)
    if text not in ("base", "none") and not (count.isdecimal() and int(count)):
        raise ArgumentTypeError(
            f"there is no case '{text}'; use base, none, a number of adapters, or 8{DORA}, 8{MIX} for so many DoRA "
            "adapters, mixes of two adapters"
        )
    return text


def layer_case(text: str) -> str:
    """phase:tokens:slots:rank"""
    phase, *numbers = text.split(":")
    if (
        phase not in ("decode", "prefill")
        or len(numbers) != 3
        or not all(n.isdecimal() and int(n) for n in numbers)
    ):
        raise ArgumentTypeError(
            f"case '{text}' is not phase:tokens:slots:rank, as in decode:32:8:16, with phase decode or prefill and "
            "numbers of at least 1"
        )
    return text


def device(text: str) -> str:
    """As `minivllm.config.parse_device` reads it, which says whether it is there."""
    kind, colon, index = text.partition(":")
    if text not in ("auto", "cpu", "cuda") and not (kind == "cuda" and colon and index.isdecimal()):
        raise ArgumentTypeError(f"there is no '{text}'; use auto, cpu, cuda or cuda:N")
    return text


def model(text: str) -> str:
    """The name of a shape, or a folder with a config.json."""
    if text not in SHAPE_NAMES and not (Path(text).expanduser() / "config.json").is_file():
        raise ArgumentTypeError(
            f"there is no '{text}'; use one of {', '.join(SHAPE_NAMES)}, or a folder with a config.json"
        )
    return text


def implementation(text: str) -> str:
    """package.module:make"""
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ArgumentTypeError(f"'{text}' is not package.module:make, as in benchmarks.impls:paged")
    return text


def run_as_command(name: str, main: Callable[[Sequence[str]], None]) -> None:
    """What cannot be measured is said in one sentence, with exit status 2, as argparse does it."""
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
