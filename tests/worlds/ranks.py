"""Processes that share a model, played by threads of one process: their collectives meet at a barrier."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from minivllm import LLMEngine, assembly
from minivllm.extension import Extension
from minivllm.parallel.tensor_parallel import TensorParallel
from minivllm.parts import Parts
from minivllm.worker.model_runner import Executor
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.waiting import PATIENCE


class Meeting:
    """Where `size` threads put a tensor each, and take all.

    turn   is held by the one thread that computes: Triton's interpreter knows no others
    """

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """What every thread has brought, in the order of ranks. A copy: `x` may change afterwards."""
        self.brought[rank] = x.clone()
        self.turn.release()
        try:
            self.barrier.wait()
            all_of_them = list(self.brought)
            self.barrier.wait()
        finally:
            self.turn.acquire()
        return all_of_them


class ThreadOfMany(TensorParallel):
    """As `ProcessGroup`, among threads. It sums in the order of ranks.

    calls   (name, elements) of every collective
    """

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_reduce", x.numel()))
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_gather", x.numel()))
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)


def in_lockstep(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """What `work` gives on each of `size` threads. An error on one ends the others' waiting, and is raised here."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with meeting.turn, torch.inference_mode():
                results[rank] = work(ThreadOfMany(rank, size, meeting))
        except BaseException as error:  # raised again below, by the thread that asked
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        broken = threading.BrokenBarrierError
        raise next((error for error in errors if not isinstance(error, broken)), errors[0])
    return results


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
