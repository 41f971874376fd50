"""The options of `python -m benchmarks.layers`, read without PyTorch."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import (
    LAYER_DTYPES,
    MIXES,
    SHAPE_NAMES,
    device,
    implementation,
    layer_case,
    one_of,
    whole,
)

NAME = "python -m benchmarks.layers"


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument(
        "--impl",
        type=implementation,
        action="append",
        help="package.module:make, may be repeated; see impls.py",
    )
    parser.add_argument(
        "--case", type=layer_case, action="append", help="phase:tokens:slots:rank, may be repeated"
    )
    parser.add_argument("--model", default="llama-8b", type=one_of(SHAPE_NAMES))
    parser.add_argument("--mix", default="uniform", type=one_of(MIXES))
    parser.add_argument(
        "--table", action="store_true", help="all cases, mixes and models of layer_cases.TABLE"
    )
    parser.add_argument("--block", action="store_true", help="whole blocks, but for attention; on a GPU")
    parser.add_argument("--layers", type=whole(), default=5, help="so many, each with weights of its own")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--dtype", type=one_of(LAYER_DTYPES), default="bfloat16")
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    parser.add_argument("--plot", type=Path, help="picture; beside the result file if not given")
    parser.add_argument("--plot-from", type=Path, help="measure nothing, draw this file")
    return parser.parse_args(arguments)
