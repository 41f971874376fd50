"""A cost model from what was measured: files of benchmarks/results, and records of an engine that served traffic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minivllm.simulate.cost_model import CostModel, StepWork

ROUNDS = 5


class Measured(NamedTuple):
    """Work, copies into slots that the step waited for, and the seconds that both took."""

    work: StepWork
    copies: int
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


def fit_steps(
    measured: Sequence[Measured], assumed: Mapping[str, float] | None = None
) -> tuple[dict[str, float], float]:
    """What a step costs by each kind of work, and what a copy that it waits for costs.

    Squares are of the errors' shares of the seconds that the fit says. Shares of those measured would let it say less
    than the mean. Hence it is made again by what it said before.

    assumed   field of `StepWork` -> seconds for each, which are not looked for

    ValueError for nothing to fit to.
    """
    if not measured:
        raise ValueError(
            "there is no step to fit to; give a result of `benchmarks.engine decode` or a record"
        )
    given = CostModel(dict(assumed or {}))
    seconds = np.array([one.seconds for one in measured])
    rest = seconds - [given.step_seconds(one.work) for one in measured]
    x = np.array([(*one.work, one.copies) for one in measured], dtype=float)
    x[:, [name in given.step for name in (*StepWork._fields, "copies")]] = 0
    said = seconds
    for _ in range(ROUNDS):
        found = non_negative_least_squares(x / said[:, None], rest / said)
        said = x @ found + seconds - rest
    *steps, copy = found.tolist()
    return {name: each for name, each in zip(StepWork._fields, steps) if each} | given.step, copy


def steps_of_decode(result: dict[str, Any]) -> list[Measured]:
    """Of `benchmarks.engine decode`: a step in which all requests decode, and the steps of their prompts together."""
    options, measured = result["options"], []
    for row in result["rows"]:
        used = 0 if row["case"] in ("base", "none") else min(int(row["case"]), row["requests"])
        decode = _work(row["requests"], 1, options["prompt_tokens"] + options["output_tokens"] / 2, used, 1)
        measured.append(Measured(decode, 0, row["step_ms"] / 1e3))
        tokens = row["requests"] * options["prompt_tokens"]
        steps = -(-tokens // options["max_num_batched_tokens"])
        prompts = _work(row["requests"], options["prompt_tokens"], options["prompt_tokens"], used, steps)
        measured.append(Measured(prompts, 0, row["prompt_steps_ms"] / 1e3))
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
    """Of `benchmarks.trust record`: every step."""
    return [Measured(StepWork(*row["work"]), row["copies"], row["seconds"]) for row in result["steps"]]


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
            model |= {"copy_bytes_per_s": float("inf"), "copies_beside": False}  # adapters are alike
        else:
            raise ValueError(f"'{path}' has no steps to fit to; give results of benchmarks.engine or .trust")
        sources.append(f"{path.stem} ({result['machine']['device']})")
    sources += [f"{name} assumed" for name in assumed or {}]
    steps, copy_s = fit_steps(measured, assumed)
    return CostModel(step=steps, copy_s=copy_s, source=", ".join(sources), **model)
