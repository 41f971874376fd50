"""Requests that arrive while others run, in an engine that is now and then told something else, and their answers."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from minivllm import LLMEngine, RequestOutput
from tests.worlds.engines import run, tokens_of


@dataclass
class Asked:
    """A request.   whose: what an oracle knows its weights by; None = base"""

    whose: Any
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    output: RequestOutput | None = None


def serve_arrivals(
    engine: LLMEngine,
    rng: random.Random,
    count: int,
    ask: Callable[[str], Asked],
    between: Callable[[Callable[[], None]], None] = lambda step: None,
) -> dict[str, Asked]:
    """By request id, those that ended well: all of them.

    ask       adds a request to the engine, which then steps a few times
    between   is called before each, and may step the engine
    """
    asked: dict[str, Asked] = {}
    finished: dict[str, RequestOutput] = {}

    def step() -> None:
        finished.update({output.request_id: output for output in engine.step() if output.finished})

    for number in range(count):
        between(step)
        asked[str(number)] = ask(str(number))
        while rng.random() < 0.6:
            step()
    finished |= run(engine)
    for key, one in asked.items():
        one.output = finished[key]
        assert one.output.error is None, one.output.error
        one.answer = tokens_of(one.output)
    return asked


def check_answers(
    asked: Iterable[Asked], logits_of: Callable[[Any, list[Asked]], Iterable[torch.Tensor]]
) -> int:
    """Each token of each answer is what the oracle finds likeliest after the ones before. How many there were.

    logits_of   (whose, group) -> (T, V) of each prompt with its answer, maybe padded
    """
    asked = list(asked)
    for whose in dict.fromkeys(one.whose for one in asked):
        own = [one for one in asked if one.whose == whose]
        for first in range(0, len(own), 32):
            group = own[first : first + 32]
            for one, logits in zip(group, logits_of(whose, group)):
                end = len(one.prompt) + len(one.answer) - 1
                expected = logits[len(one.prompt) - 1 : end].argmax(-1).tolist()
                assert one.answer == expected, (one.whose, one.prompt)
    return sum(len(one.answer) for one in asked)
