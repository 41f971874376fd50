"""An engine that computes nothing and takes its time: what surrounds a GPU's steps can be measured without one."""

import time
from typing import Any

import torch

from minivllm.assembly import LLMEngine
from minivllm.worker.row_sampler import PendingStep, Sampled

# A step of more tokens takes longer in proportion: that many are as fast as one.
TOKENS_FOR_FREE = 256


def take_time(engine: LLMEngine, seconds: float) -> None:
    """From now on a step is launched at once, and its tokens are there so many seconds later, as those of a GPU are.

    Whoever waits for them does so without the GIL. Every token is 0.
    """
    runner = engine.runner
    sample = runner.sample_tokens
    ready_at = 0.0

    def forward(input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        nonlocal ready_at
        ready_at = time.perf_counter() + seconds * max(1, len(input_ids) / TOKENS_FOR_FREE)
        return input_ids

    def wait_and_sample(step: PendingStep) -> Sampled:
        time.sleep(max(0, ready_at - time.perf_counter()))
        return sample(step)

    runner.model.forward = forward
    runner.model.compute_logits = lambda last_ids: torch.zeros(len(last_ids), 2)
    runner.sample_tokens = wait_and_sample
    runner.on_gpu = True
