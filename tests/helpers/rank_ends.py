"""What tests do to the ranks of an engine, also in another process: functions go there by name."""

import os
import signal

import pytest
import torch.distributed as dist
from patience import wait_until

from minivllm import LLMEngine
from minivllm.errors import EngineDeadError


def rank_pids(engine: LLMEngine) -> list[int]:
    """Of all ranks, by rank."""
    return [os.getpid(), *(process.pid for process in engine.executor.others.processes)]


def kill_rank(engine: LLMEngine, rank: int) -> None:
    os.kill(rank_pids(engine)[rank], signal.SIGKILL)


def misinform_others(engine: LLMEngine) -> None:
    """From now on the other ranks get places that no context has: their steps raise an IndexError."""
    write = engine.executor._writer.write

    def misinform(output: object) -> object:
        message = write(output)
        return message._replace(starts=[10**6] * len(message.starts))

    engine.executor._writer.write = misinform


def dies_in_a_step(engine: LLMEngine, match: str) -> None:
    """Step the engine until it has ended; from then on every step says so."""
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=match):
            wait_until(lambda: engine.step() and False)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int]) -> None:
    """Wait until these processes have ended."""
    wait_until(lambda: not any(map(is_there, pids)))


def group_is_left() -> None:
    """Wait until this process has left its group of torch.distributed: once a rank has ended, a thread does that."""
    wait_until(lambda: not dist.is_initialized())
