"""The KV cache of a GPU: what weights, slots and the largest step leave.

Stands for vllm/v1/worker/gpu_worker.py (v0.22.1).
"""

from collections.abc import Callable
from functools import partial

import torch

from minivllm.gpu.cuda_graphs import mixed_sizes
from minivllm.worker.kv_memory import KVMemory
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.warm_up import largest_step, profile_run


class MeasuredMemory(KVMemory):
    """A `KVMemory` that runs the largest step, and takes what it leaves.

    captures   whether steps will be captured: graphs have memory of their own
    """

    def __init__(self, captures: bool) -> None:
        self.captures = captures

    def measure(self, runner: ModelRunner) -> int:
        """ValueError when the GPU has not even room for two blocks."""
        config = runner.config
        captured = mixed_sizes(config.scheduler_config.max_num_batched_tokens)[-1]
        share = captured / sum(largest_step(config)) if self.captures else 0
        utilization = config.cache_config.gpu_memory_utilization
        left = determine_available_memory(partial(profile_run, runner), runner.device, utilization, share)
        if left < 2 * runner.kv_block_bytes:
            raise ValueError(
                f"weights, LoRA slots and the largest step leave {left / 2**20:.0f} MiB of the GPU for keys and "
                f"values at gpu_memory_utilization {utilization}; raise it, or lower max_num_batched_tokens or "
                "max_loras"
            )
        return left


def determine_available_memory(
    profile_run: Callable[[], None], device: torch.device | str, utilization: float, captured_share: float = 0
) -> int:
    """Bytes for the KV cache: the wanted share of the GPU, less everything else. vLLM: the same name.

    profile_run      runs the largest step there can be; weights and slots are in place already. What it holds at its
                     peak is counted, and what others and the driver hold
    captured_share   tokens of the largest captured step, by those of that largest one. CUDA graphs share one memory,
                     beside that of other steps. What the driver keeps of them is in what `utilization` leaves free

    Can be negative.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile_run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    of_graphs = int(captured_share * (peak - before))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - outside_torch - peak - of_graphs
