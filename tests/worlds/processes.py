"""What tests do to an engine or a rank in another process, which takes functions by name, and how they see it end."""

import itertools
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from minivllm import LLMEngine
from minivllm.errors import EngineDeadError
from tests.worlds.waiting import PATIENCE, wait_until


def process_id(engine: LLMEngine) -> int:
    return os.getpid()


def touch(engine: LLMEngine, file: Path) -> None:
    file.touch()


def check_is_empty(engine: LLMEngine) -> None:
    from tests.oracles.invariants import check_engine  # it stands beside the engine's tests

    check_engine(engine, [])


def check_slots(engine: LLMEngine) -> None:
    from tests.oracles.invariants import check_slot_contents

    check_slot_contents(engine)


def open_requests(engine: LLMEngine) -> list[str]:
    return list(engine.output_processor.states)


def steps_taken(engine: LLMEngine) -> int:
    return engine.metrics.steps


def wait_for(engine: LLMEngine, file: Path) -> None:
    """Hold the engine up until there is such a file."""
    wait_until(file.exists)


def hold_after(engine: LLMEngine, steps: int, file: Path) -> None:
    """The engine takes so many steps from now on, and hands out nothing of the last one until there is such a file."""
    left = itertools.count(steps - 1, -1)
    engine.listeners.append(lambda scheduled: next(left) <= 0 and wait_for(engine, file))


def break_steps(engine: LLMEngine) -> None:
    def step(**options: object) -> None:
        raise ZeroDivisionError("a step that is broken")

    engine.step = step


def say(engine: LLMEngine, text: str) -> None:
    logging.getLogger("minivllm.tests").warning(text)


def engine_itself(engine: LLMEngine) -> LLMEngine:
    return engine


def fail_to_make() -> LLMEngine:
    raise ValueError("no such engine; make another one")


def die_while_made() -> LLMEngine:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still_after(engine: LLMEngine, steps: int, file: Path) -> None:
    """The engine never comes back from the last of so many steps. When it is there, there is such a file."""
    left = itertools.count(steps - 1, -1)
    engine.listeners.append(lambda scheduled: next(left) <= 0 and (file.touch(), time.sleep(10 * PATIENCE)))


FAR_CALLS = (
    *(process_id, touch, check_is_empty, check_slots, open_requests, steps_taken, wait_for, hold_after),
    *(break_steps, say, engine_itself, stand_still_after, LLMEngine.abort_request),
)


def parent_pid(engine: LLMEngine) -> int:
    """Of the process that started this one: in a fleet, the replica's."""
    return os.getppid()


def tokens_made(engine: LLMEngine) -> tuple[int, int]:
    """The replica's process id, and how many tokens its engine has sampled."""
    return os.getppid(), engine.scheduler.num_sampled_tokens


def end_process(engine: LLMEngine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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
