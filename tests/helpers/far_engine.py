"""What tests do to an engine in another process. Functions go there by name, so they stand in a module of their own."""

import logging
import os
import signal
import time
from pathlib import Path

from minivllm import LLMEngine


def process_id(engine: LLMEngine) -> int:
    return os.getpid()


def hold_up(engine: LLMEngine, seconds: float) -> None:
    time.sleep(seconds)


def check_is_empty(engine: LLMEngine) -> None:
    from soak_checks import check_engine  # it stands beside the engine's tests

    check_engine(engine, [])


def check_slots(engine: LLMEngine) -> None:
    from soak_checks import check_slot_contents

    check_slot_contents(engine)


def open_requests(engine: LLMEngine) -> list[str]:
    return list(engine.output_processor.states)


def steps_taken(engine: LLMEngine) -> int:
    return engine.metrics.steps


def wait_for(engine: LLMEngine, file: Path) -> None:
    """Hold the engine up until there is such a file."""
    until = time.monotonic() + 30
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)


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
