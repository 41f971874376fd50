"""What an engine's process does and tells of itself (`AsyncLLM.call`), for tests that kill it or whoever started it."""

import os
import signal

from minivllm.assembly import LLMEngine


def parent_pid(engine: LLMEngine) -> int:
    """Of the process that started this one: in a fleet, the replica's."""
    return os.getppid()


def tokens_made(engine: LLMEngine) -> tuple[int, int]:
    """The replica's process id, and how many tokens its engine has sampled."""
    return os.getppid(), engine.scheduler.num_sampled_tokens


def end_process(engine: LLMEngine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
