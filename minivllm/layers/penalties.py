"""Logits after biases and penalties. Stands for vllm/v1/sample/ops/penalties.py and logit_bias (v0.22.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minivllm.layers.to_device import to_device
from minivllm.sampling_params import SamplingParams

# Token ids, each once, and a number for each: (n,) int64, (n,) float64
Numbers = tuple[np.ndarray, np.ndarray]


class TokenHistory(NamedTuple):
    """The tokens that a request has by now: its prompt's and its answer's."""

    prompt: Sequence[int]
    output: Sequence[int]


def apply_penalties(
    logits: torch.Tensor, rows: Sequence[SamplingParams], histories: Sequence[TokenHistory]
) -> torch.Tensor:
    """Logits with each row's bias added, then its repetition, frequency and presence penalty, in vLLM's order.

    logits: (P, V) of any float dtype, left as they are -> (P, V) float32, or float64 if that is theirs
    rows, histories: P each; rows that ask for nothing (`changes_logits`) keep their logits

    What changes is worked out in float64. A logit of -inf stays what it is.
    """
    result = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # (P, V)
    for numbers_of, change in ((_biases, torch.add), (_repetitions, _penalize), (_frequencies, torch.sub)):
        numbers = [
            (i, *numbers_of(params, histories[i])) for i, params in enumerate(rows) if params.changes_logits
        ]
        row_ids = np.concatenate([np.full(len(ids), i) for i, ids, _ in numbers])  # (n,)
        ids = np.concatenate([ids for _, ids, _ in numbers])  # (n,)
        values = np.concatenate([values for _, _, values in numbers])  # (n,)
        # An adapter may read tokens of its own for which there are no logits.
        known = ids < logits.shape[1]
        row_ids, ids, values = (to_device(of[known], result.device) for of in (row_ids, ids, values))
        result[row_ids, ids] = change(result[row_ids, ids].double(), values).to(result.dtype)
    return result


def _biases(params: SamplingParams, history: TokenHistory) -> Numbers:
    biases = params.logit_bias or {}
    return np.array(list(biases), dtype=np.int64), np.array(list(biases.values()), dtype=np.float64)


def _repetitions(params: SamplingParams, history: TokenHistory) -> Numbers:
    """The repetition penalty of every token that prompt or answer have."""
    seen = [] if params.repetition_penalty == 1 else [*history.prompt, *history.output]
    ids = np.unique(np.array(seen, dtype=np.int64))
    return ids, np.full(len(ids), params.repetition_penalty)


def _frequencies(params: SamplingParams, history: TokenHistory) -> Numbers:
    """What frequency and presence penalty take off every token that the answer has."""
    ids, counts = np.unique(np.array(history.output, dtype=np.int64), return_counts=True)
    return ids, params.frequency_penalty * counts + params.presence_penalty


def _penalize(logits: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)
