"""One rank among several: how it joins the others. Stands for vllm/v1/worker/gpu_worker.py (v0.22.1)."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from minivllm.config import EngineConfig, ParallelConfig
from minivllm.parallel.peers.group import make_peer_group
from minivllm.parallel.process_group import ProcessGroup
from minivllm.parallel.tensor_parallel import TensorParallel
from minivllm.worker.cpu_threads import available_cores
from minivllm.worker.model_runner import ModelRunner

# So long ranks may be apart: one may have read the model sooner than another.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)

_LEAVING = threading.Lock()


# (config, tp, adapters_are_active) -> the runner of one rank; `assembly` has it.
MakeRunner = Callable[[EngineConfig, TensorParallel, Callable[[], None]], ModelRunner]


def make_rank_runner(
    config: EngineConfig, make_runner: MakeRunner, adapters_are_active: Callable[[], None] | None = None
) -> ModelRunner:
    """A runner that has its part of every layer, and as many KV blocks as all others."""
    runner = make_runner(config, make_group(config.device, config.parallel_config), adapters_are_active)
    dist.all_reduce(torch.zeros(1))  # every rank has its model by now
    return runner


def make_group(device: str, parallel_config: ParallelConfig) -> ProcessGroup:
    """The ranks, once they have met, and how they sum: NCCL and gloo do, but for what GPUs sum in each other's memory.

    ValueError as of `make_peer_group`.
    """
    if torch.device(device).type == "cuda" and not parallel_config.disable_custom_all_reduce:
        return make_peer_group(device)
    return ProcessGroup()


def join_ranks(rank: int, size: int, device: str, store: dist.Store | None = None) -> None:
    """Be one of `size` processes, which meet at a store, or where the environment says (torchrun).

    Numbers on the host go through gloo, those on a GPU through NCCL.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device_of(rank, device))
        # NVLink multicast takes rights that a container seldom has, and gains nothing for so few numbers.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # Who ends the engine when a rank has ended is `OtherRanks`: PyTorch would end this process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def leave_ranks() -> None:
    """Whatever other ranks do: what waits for them on this one ends with an error.

    NCCL ends what runs on the GPU at once. Then it waits for the end of all graphs that were captured with it.
    """
    with _LEAVING:
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()


def config_of(rank: int, config: EngineConfig) -> EngineConfig:
    """The same for one of the ranks: its GPU, or its share of the CPU's cores."""
    size = config.parallel_config.tensor_parallel_size
    threads = config.threads
    if threads is None and not os.environ.get("OMP_NUM_THREADS"):
        threads = max(1, available_cores() // size)
    return replace(config, device=device_of(rank, config.device), threads=threads)


def device_of(rank: int, device: str) -> str:
    """One GPU a rank, from the first rank's on."""
    first = torch.device(device)
    return device if first.type == "cpu" else f"cuda:{(first.index or 0) + rank}"
