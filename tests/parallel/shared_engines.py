"""Engines that share a model, one a thread, each with a scheduler of its own; they make the same steps."""

import threading
from collections.abc import Callable
from typing import Any

from lockstep import in_lockstep
from tiny_engine import greedy, run, tokens_of

from minivllm import LLMEngine, assembly
from minivllm.extension import Extension
from minivllm.parallel.tensor_parallel import TensorParallel
from minivllm.parts import Parts
from minivllm.worker.model_runner import Executor


def engines_in_lockstep(monkeypatch: Any, size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """What `work` gives on each of `size` threads, where engines that it makes have their thread's part of a model."""
    mine = threading.local()

    def play(tp: TensorParallel) -> Any:
        mine.tp = tp
        return work(tp)

    def share(parts: Parts) -> None:
        parts.make_executor = lambda config, make_runner, tokenizer: Executor(
            make_runner(config, mine.tp, tokenizer=tokenizer)
        )

    monkeypatch.setattr(assembly, "EXTENSIONS", (*assembly.EXTENSIONS, Extension(add_to=share)))
    return in_lockstep(size, play)


def serve(engine: LLMEngine, world: Any, pairs: list[tuple], max_tokens: int) -> list[list[int]]:
    """The tokens of (adapter, prompt) pairs in one batch, however long that takes."""
    for i, (name, prompt) in enumerate(pairs):
        engine.add_request(str(i), prompt, greedy(max_tokens), lora_request=world.request(name))
    finished = run(engine)
    return [tokens_of(finished[str(i)]) for i in range(len(pairs))]


def assert_shared_engines_answer(
    monkeypatch: Any, world: Any, size: int, pairs: list[tuple], max_tokens: int = 5, **options: object
) -> None:
    """Every thread's engine gives each request what transformers and PEFT give it alone."""
    expected = [world.answer(name, prompt, max_tokens) for name, prompt in pairs]

    answers = engines_in_lockstep(
        monkeypatch, size, lambda tp: serve(world.engine(**options), world, pairs, max_tokens)
    )

    assert answers == [expected] * size
