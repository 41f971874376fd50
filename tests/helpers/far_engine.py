"""What tests do to an engine in another process, which takes these calls beside its own (`FAR_CALLS`)."""

import itertools
import logging
import os
import signal
import time
from pathlib import Path

from patience import PATIENCE, wait_until

from minivllm import LLMEngine


def process_id(engine: LLMEngine) -> int:
    return os.getpid()


def touch(engine: LLMEngine, file: Path) -> None:
    file.touch()


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
    *(
        process_id,
        touch,
        check_is_empty,
        check_slots,
        open_requests,
        steps_taken,
        wait_for,
        hold_after,
        break_steps,
    ),
    *(say, engine_itself, stand_still_after, LLMEngine.abort_request),
)
