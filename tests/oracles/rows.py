"""Comparison of tensors row by row, whose failures say which row, whose it is, and what it should have been."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

SHOWN = 6  # values of a row


def assert_rows_equal(
    got: Any,
    expected: Any,
    *,
    labels: Sequence[str] | None = None,
    tolerance: float = 0.0,
    what: str = "rows",
    nan: str = "",
) -> None:
    """Both have the same shape, and every row of `got` is the one expected, NaN where NaN is expected.

    got, expected  (T, ...) tensors or lists; their dtypes may differ
    labels         T texts that say whose rows they are, such as "request 'b', adapter 2"
    tolerance      how far off a value may be, as a share of the largest value expected; 0 = not at all
    what           what the rows are, in a word or two
    nan            what it means where the first wrong row has a NaN that it should not have; said in a line of its own
    """
    __tracebackhide__ = True
    got, expected = (torch.as_tensor(t).detach().cpu() for t in (got, expected))
    shapes = f"shape {tuple(got.shape)} {_dtype(got)}, expected {tuple(expected.shape)} {_dtype(expected)}"
    assert got.shape == expected.shape, f"{what}: {shapes}"
    if not got.numel():
        return
    mine, theirs = (_wide(t).reshape(len(t), -1) for t in (got, expected))  # (T, N)
    largest = theirs.abs().nan_to_num(0, 0, 0).max().item()
    allowed = tolerance * max(largest, 1e-3)
    off = torch.where((mine == theirs) | (mine.isnan() & theirs.isnan()), 0, (mine - theirs).abs())
    is_wrong = ~(off <= allowed).all(1)  # (T,) NaN is wrong
    if is_wrong.any():
        row = is_wrong.nonzero()[0].item()
        label = f", {labels[row]}" if labels is not None else ""
        meaning = f"\n  nan: {nan}" if nan and (mine[row].isnan() & ~theirs[row].isnan()).any() else ""
        raise AssertionError(
            f"{what}: {is_wrong.sum()} of {len(off)} rows are wrong ({shapes})\n"
            f"the first is row {row}{label}\n{_values(mine[row], theirs[row], off[row], allowed)}{meaning}"
        )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(mine: torch.Tensor, theirs: torch.Tensor, off: torch.Tensor, allowed: float) -> str:
    """The two rows around the column that is off most.   mine, theirs, off: (N,)"""
    worst = off.double().nan_to_num(float("inf")).argmax().item()
    first = max(0, min(worst - SHOWN // 2, len(off) - SHOWN))
    columns = slice(first, first + SHOWN)
    of = f", columns {first} to {min(first + SHOWN, len(off)) - 1} of {len(off)}" if len(off) > SHOWN else ""
    lines = [f"  {name:<9}{_text(row[columns])}" for name, row in (("expected", theirs), ("got", mine))]
    limit = f", {allowed:.2g} allowed" if allowed else ""
    return "\n".join([f"{lines[0]}{of}", lines[1], f"  column {worst} is off by {off[worst]:.4g}{limit}"])


def _text(row: torch.Tensor) -> str:
    return (
        "["
        + ", ".join(f"{value:.4g}" if row.is_floating_point() else str(value) for value in row.tolist())
        + "]"
    )


def labels_of(token_slots: Iterable[int]) -> list[str]:
    """token_slots: (T,) list or tensor, -1 = base"""
    return ["a base row" if slot < 0 else f"slot {int(slot)}" for slot in token_slots]
