"""How much of a GPU is left for keys and values. Stands for vllm/v1/worker/gpu_worker.py (v0.22.1)."""

from collections.abc import Callable

import torch


def determine_available_memory(
    profile_run: Callable[[], None], device: torch.device | str, utilization: float
) -> int:
    """Bytes for the KV cache: the wanted share of the GPU, less everything else. vLLM: the same name.

    profile_run   runs the largest step there can be; weights and slots are in place already. What it holds at its
                  peak is counted, and what others and the driver hold. CUDA graphs are captured later, in the share
                  that `utilization` leaves free

    Can be negative.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - outside_torch - peak
