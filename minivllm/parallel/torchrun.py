"""Ranks that torchrun has started. Stands for a part of vllm/v1/executor/uniproc_executor.py (v0.22.1).

There, with the "external_launcher", every rank has a scheduler, and all decide alike. Here rank 0 decides.
"""

import os
import secrets
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist

from minivllm.parallel.other_ranks import OtherRanks
from minivllm.parallel.ranks import join_ranks, leave_ranks


def is_by_torchrun() -> bool:
    """Whether this process is one of several that were started together."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def meet_others(size: int, device: str) -> OtherRanks:
    """On rank 0 the pipes to all others, of the same host. Others follow, and then exit.

    ValueError when the processes are not as many as the engine has ranks.
    """
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if started != size:
        raise ValueError(
            f"torchrun has started {started} processes, but tensor_parallel_size is {size}; make them equal"
        )
    join_ranks(rank, size, device)
    if rank == 0:
        key = secrets.token_bytes()
        with Listener(family="AF_UNIX", authkey=key) as listener:
            _share((listener.address, key))
            arrived = [_arrival(listener) for _ in range(1, size)]
        return OtherRanks([pipe for _, pipe in sorted(arrived, key=lambda arrival: arrival[0])])
    from minivllm.parallel.follower import follow  # rank 0 needs none of it

    address, key = _share(None)
    with Client(address, authkey=key) as pipe:
        pipe.send(rank)
        follow(pipe)
    leave_ranks()
    raise SystemExit(0)


def _share(value: Any) -> Any:
    """What rank 0 gives."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def _arrival(listener: Listener) -> tuple[int, Connection]:
    pipe = listener.accept()
    return pipe.recv(), pipe
