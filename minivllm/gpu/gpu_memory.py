"""Whether slots fit, and how much of a GPU is left for keys and values.

Stands for vllm/v1/worker/gpu_worker.py (v0.22.1).
"""

import os
from collections.abc import Callable

import torch

from minivllm.config import EngineConfig
from minivllm.economics import adapted_layers, slot_memory
from minivllm.parallel.alone import ALONE
from minivllm.parallel.tensor_parallel import TensorParallel


def refuse_slots_that_do_not_fit(config: EngineConfig, tp: TensorParallel = ALONE) -> None:
    """ValueError when a device cannot hold what LoRA is about to allocate; the base model is there already.

    vLLM runs out of memory instead.
    """
    model, lora_config = config.model_config.architecture, config.lora_config
    needed = slot_memory(model, lora_config, config.device, config.model_config.dtype, tp).total
    if needed <= (free := room_for_slots(config.device)):
        return
    names = sorted({name.rpartition(".")[2] for name in adapted_layers(model, lora_config)})
    options = ("max_loras", "max_lora_rank", "lora_extra_vocab_size", "long_lora_scaling_factors")
    given = [f"{name} ({value})" for name in options if (value := getattr(lora_config, name))]
    raise ValueError(
        f"LoRA slots need {needed:,} bytes, but {config.device} has {free:,} for them: lower "
        f"{', '.join(given[:-1])} or {given[-1]}, or name fewer target_modules than {', '.join(names)}"
    )


def room_for_slots(device: torch.device | str) -> int:
    """Bytes: on a GPU what is free now. On a CPU all memory that the machine has.

    What of it can be had is not asked: the system may swap, count files it could forget, or stop a container
    short of it. It is enough to refuse what can never be held.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_left(
    profile_run: Callable[[], None],
    device: torch.device | str,
    utilization: float,
    captured_share: float,
    least: int,
) -> int:
    """As `determine_available_memory`; ValueError if it is less than `least`."""
    left = determine_available_memory(profile_run, device, utilization, captured_share)
    if left < least:
        raise ValueError(
            f"weights, LoRA slots and the largest step leave {left / 2**20:.0f} MiB of the GPU for keys and "
            f"values at gpu_memory_utilization {utilization}; raise it, or lower max_num_batched_tokens or max_loras"
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
