"""Logprobs of prompts' tokens. Stands for a part of vllm/v1/worker/gpu_model_runner.py (v0.22.1).

vLLM computes these logits with the mapping of the rows that sample, one a request, and so leaves out an adapter's
`lm_head`. Here each pass over logits has a mapping of its own, with one row for every row of logits.
"""

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from minivllm.config import EngineConfig
from minivllm.core.request import Request
from minivllm.layers.sampler import top_logprobs
from minivllm.worker.input_batch import InputBatch


class Runner(Protocol):
    """The interface of the model runner that scoring needs."""

    config: EngineConfig
    model: torch.nn.Module
    worker_manager: object | None

    def set_active_loras(
        self, input_batch: InputBatch, num_scheduled_tokens: np.ndarray, num_sampled_tokens: np.ndarray
    ) -> None: ...


def score_prompts(runner: Runner, batch: InputBatch, hidden_states: torch.Tensor) -> None:
    """Extend `prompt_logprobs` of the requests that want them by what this step's tokens say of the next ones.

    hidden_states: (T, H) of the batch's tokens, a run for each row

    Logits are computed for `max_num_seqs` rows at a time: no backend has room for more. The adapters' mapping is
    that of the last of these rows afterwards, so the step's own logits must have been computed before.
    """
    first = 0
    for row, (request, tokens) in enumerate(zip(batch.requests, batch.num_scheduled_tokens.tolist())):
        if request.wants_prompt_logprobs and tokens:
            _score(runner, batch, row, hidden_states[first : first + tokens])
        first += tokens


def _score(runner: Runner, batch: InputBatch, row: int, hidden_states: torch.Tensor) -> None:
    """Score one request's prompt; its first token has no logprobs.   hidden_states: (t, H) of its tokens"""
    request = batch.requests[row]
    request.prompt_logprobs = request.prompt_logprobs or [None]
    start = request.num_computed_tokens
    most = runner.config.scheduler_config.max_num_seqs
    # The hidden state of token i says what token i + 1 may be.
    end = min(start + len(hidden_states), request.num_prompt_tokens - 1)
    while (known := len(request.prompt_logprobs)) <= end:
        piece = hidden_states[known - 1 - start : end - start][:most]  # (n, H)
        if runner.worker_manager is not None:
            counts, starts = np.zeros_like(batch.num_scheduled_tokens), [0] * len(batch.requests)
            counts[row], starts[row] = len(piece), known - 1
            rows = InputBatch(batch.requests, counts, counts).split_at_adapters(starts)
            runner.set_active_loras(rows, rows.num_scheduled_tokens, rows.num_sampled_tokens)
        logits = runner.model.compute_logits(piece)  # (n, V)
        request.prompt_logprobs += _logprobs_of(logits, request, known)


def _logprobs_of(logits: torch.Tensor, request: Request, known: int) -> list:
    """A dict for each of the n prompt tokens from number `known` on.   logits: (n, V)"""
    token_ids = torch.tensor(request.prompt_token_ids[known : known + len(logits)], device=logits.device)
    # Tokens that an adapter only reads have no logits.
    missing = max(0, int(token_ids.max()) + 1 - logits.shape[1])
    logits = F.pad(logits, (0, missing), value=-torch.inf)
    return top_logprobs(logits, token_ids, request.sampling_params.prompt_logprobs)
