"""What tests do to the ranks of an engine, also in another process: functions go there by name."""

import os
import signal
import time
from collections.abc import Callable

import torch.distributed as dist

from minivllm import LLMEngine


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


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int], seconds: float = 5) -> bool:
    """Whether they do, within so many seconds."""
    return _comes(lambda: not any(map(is_there, pids)), seconds)


def group_is_left(seconds: float = 5) -> bool:
    """Whether this process leaves its group of torch.distributed; when a rank has ended, a thread of its own does."""
    return _comes(lambda: not dist.is_initialized(), seconds)


def _comes(is_so: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()
