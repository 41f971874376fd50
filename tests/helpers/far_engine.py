"""What tests do to an engine in another process. Functions go there by name, so they stand in a module of their own."""

import logging
import os
import signal
import time

from minivllm import LLMEngine


def process_id(engine: LLMEngine) -> int:
    return os.getpid()


def hold_up(engine: LLMEngine, seconds: float) -> None:
    time.sleep(seconds)


def check_is_empty(engine: LLMEngine) -> None:
    from soak_checks import check_engine  # it stands beside the engine's tests

    check_engine(engine, [])


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
