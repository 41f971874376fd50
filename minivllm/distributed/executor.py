"""What runs an engine's steps: one runner, or several ranks. Stands for vllm/v1/executor/abstract.py (v0.22.1)."""

from collections.abc import Callable

from minivllm.config import EngineConfig
from minivllm.worker import runners
from minivllm.worker.model_runner import ModelRunner


def make_runner(config: EngineConfig) -> ModelRunner:
    """A runner of this process alone, or one that has other ranks run each step too. Errors as of `ModelRunner`."""
    if config.parallel_config.tensor_parallel_size == 1:
        return runners.make_runner(config)
    from minivllm.distributed.leader import start_ranks  # whoever is alone needs none of it

    return start_ranks(config)


def when_a_rank_ends(runner: ModelRunner, tell: Callable[[Callable[[], None]], object]) -> None:
    """Give `tell`, from a thread of its own, what raises the EngineDeadError; never, where there are no others."""
    if (others := getattr(runner, "others", None)) is not None:
        others.on_death.append(lambda: tell(others.check))
