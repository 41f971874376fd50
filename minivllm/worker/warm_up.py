"""Dummy steps: to warm up, and to measure memory. Stands for `_dummy_run` and `profile_run` of
vllm/v1/worker/gpu_model_runner.py (v0.22.1).
"""

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.config import EngineConfig
from minivllm.layers.penalties import TokenHistory
from minivllm.progress import followed
from minivllm.sampling_params import SamplingParams
from minivllm.worker.kv_memory import MemoryPlan

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner


@torch.inference_mode()
def run_warm_up_steps(runner: "ModelRunner") -> float:
    """One prompt and one decode batch; on a GPU the largest step too, because it has kernels of its own.

    Returns the seconds of the last one.
    """
    config = runner.config
    tokens = min(16, config.cache_config.block_size, config.model_config.max_model_len)
    rows = min(8, config.scheduler_config.max_num_seqs)
    steps = [tokens], [1] * rows, *([largest_step(config)] if runner.on_gpu else [])
    seconds = 0.0
    for query_lens in followed(steps, "Warming up kernels"):
        started = time.perf_counter()
        with runner.cpu_threads.in_use():
            dummy_run(runner, query_lens)
        seconds = time.perf_counter() - started
    return seconds


def dummy_run(runner: "ModelRunner", query_lens: list[int], num_logits: int = 1) -> torch.Tensor:
    """A forward pass on token 0 in the null block, whose contents are never read; (num_logits, V)"""
    scheduled = np.array(query_lens)
    sampled = np.zeros_like(scheduled)
    sampled[-1] = num_logits  # logits have adapters too, as many rows as are computed
    with runner.maybe_dummy_run_with_lora(runner.config.lora_config, scheduled, sampled):
        block_size = runner.config.cache_config.block_size
        tables = [[0] * -(-length // block_size) for length in query_lens]
        attn = runner.build_attention(query_lens, query_lens, tables)
        positions = torch.from_numpy(np.concatenate([np.arange(n) for n in query_lens])).to(runner.device)
        hidden_states = runner.model(torch.zeros_like(positions), positions, attn)  # (T, H)
        return runner.model.compute_logits(hidden_states[-num_logits:])


def largest_step(config: EngineConfig) -> list[int]:
    """As many prompt tokens as a step may have, in as few requests as there can be: the tokens of each."""
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * longest)
    return [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)


@torch.inference_mode()
def profile_run(runner: "ModelRunner") -> None:
    """The step that needs most memory: as many prompt tokens as fit, and every filter on as many rows."""
    query_lens = largest_step(runner.config)
    runner.memory.allocate(runner, MemoryPlan(1))
    rows = min(sum(query_lens), runner.config.scheduler_config.max_num_seqs)
    logits = dummy_run(runner, query_lens, rows)  # (P, V)
    params = SamplingParams(top_k=2, top_p=0.5, min_p=0.5, presence_penalty=1)
    runner.sampler(logits, [params] * rows, [None] * rows, [0] * rows, [TokenHistory([0], [0])] * rows)
