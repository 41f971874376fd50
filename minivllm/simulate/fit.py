"""A cost model from what was measured: files of benchmarks/results, and records of an engine that served traffic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.simulate.cost_model import CostModel, StepWork


@dataclass(frozen=True)
class Measured:
    """Work, and the seconds that it took."""

    work: StepWork
    seconds: float


def non_negative_least_squares(x: np.ndarray, y: np.ndarray, sweeps: int = 20_000) -> np.ndarray:
    """(F,) coefficients, none below 0, with the least squares of `x @ coefficients - y`: x (M, F), y (M,).

    One coefficient after the other is set to what is best while the others stay, until none moves.
    """
    scale = np.linalg.norm(x, axis=0)
    scale[scale == 0] = 1.0
    unit = x / scale
    gram, target = unit.T @ unit, unit.T @ y
    found = np.zeros(x.shape[1])
    for _ in range(sweeps):
        before = found.copy()
        for i in np.flatnonzero(gram.diagonal()):
            found[i] = max(0.0, found[i] + (target[i] - gram[i] @ found) / gram[i, i])
        if np.abs(found - before).max() <= 1e-12 * (1 + np.abs(found).max()):
            break
    return found / scale


def fit_steps(measured: Sequence[Measured], assumed: Mapping[str, float]) -> dict[str, float]:
    """What a step costs by each kind of work. Squares are of the errors' shares of the seconds.

    assumed   field of `StepWork` -> seconds for each, which are not looked for

    ValueError for nothing to fit to.
    """
    if not measured:
        raise ValueError(
            "there is no step to fit to; give a result of `benchmarks.engine decode` or a record"
        )
    seconds = np.array([one.seconds for one in measured])
    given = CostModel(dict(assumed))
    rest = 1 - np.array([given.step_seconds(one.work) for one in measured]) / seconds
    x = np.array([one.work for one in measured], dtype=float) / seconds[:, None]
    x[:, [name in assumed for name in StepWork._fields]] = 0
    found = zip(StepWork._fields, non_negative_least_squares(x, rest).tolist())
    return {name: each for name, each in found if each} | given.step


def steps_of_decode(result: dict[str, Any]) -> list[Measured]:
    """Of `benchmarks.engine decode`: a step in which all requests decode, and the steps of their prompts together."""
    options, measured = result["options"], []
    for row in result["rows"]:
        used = 0 if row["case"] in ("base", "none") else min(int(row["case"]), row["requests"])
        decode = _work(row["requests"], 1, options["prompt_tokens"] + options["output_tokens"] / 2, used, 1)
        measured.append(Measured(decode, row["step_ms"] / 1e3))
        tokens = row["requests"] * options["prompt_tokens"]
        steps = -(-tokens // options["max_num_batched_tokens"])
        prompts = _work(row["requests"], options["prompt_tokens"], options["prompt_tokens"], used, steps)
        measured.append(Measured(prompts, row["prompt_steps_ms"] / 1e3))
    return measured


def _work(requests: int, tokens: int, context: float, adapters: int, steps: int) -> StepWork:
    """Of as many rows that compute `tokens` each, in so many steps that all have the same adapters."""
    return StepWork(
        steps=steps,
        prompt_steps=steps * (tokens > 1),
        requests=requests,
        tokens=requests * tokens,
        context=requests * context,
        pairs=requests * tokens * (context - (tokens - 1) / 2) / 1000,
        lora=steps * bool(adapters),
        adapters=steps * adapters,
        lora_tokens=requests * tokens * bool(adapters),
        admitted=requests * (tokens > 1),
    )


def steps_of_record(result: dict[str, Any]) -> list[Measured]:
    """Of `benchmarks.trust record`: every step, less what it waited for copies."""
    return [Measured(StepWork(*row["work"]), row["seconds"] - sum(row["copies"])) for row in result["steps"]]


def fit(paths: Iterable[Path], assumed: Mapping[str, float] | None = None) -> CostModel:
    """One cost model from all these files; `assumed` as in `fit_steps`. ValueError names a file of another kind."""
    measured: list[Measured] = []
    model: dict[str, Any] = {}
    sources = []
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        kind = result.get("benchmark")
        if kind == "engine-decode":
            measured += steps_of_decode(result)
        elif kind == "engine-switch":
            (row,) = [row for row in result["rows"] if row["measure"] == "switch"]
            model["copy_bytes_per_s"] = row["bytes"] / (row["complete_ms"] / 1e3)
            model["bytes_per_rank"] = row["bytes"] / result["options"]["rank"]
        elif kind == "trust":
            measured += steps_of_record(result)
            model |= copies_of_record(result)
        else:
            raise ValueError(f"'{path}' has no steps to fit to; give results of benchmarks.engine or .trust")
        sources.append(f"{path.stem} ({result['machine']['device']})")
    sources += [f"{name} assumed" for name in assumed or {}]
    return CostModel(step=fit_steps(measured, assumed or {}), source=", ".join(sources), **model)


def copies_of_record(result: dict[str, Any]) -> dict[str, Any]:
    """A copy's seconds: the median of those in the record, whose adapters are alike. They hold up the step."""
    seconds = [one for row in result["steps"] for one in row["copies"]]
    return {
        "copy_s": float(np.median(seconds)) if seconds else 0.0,
        "copy_bytes_per_s": float("inf"),
        "copies_beside": False,
    }
