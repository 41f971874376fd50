"""What runs an engine's steps. Stands for `Executor` of vllm/v1/executor/abstract.py (v0.22.1)."""

from collections.abc import Callable

from minivllm.core.output import SchedulerOutput
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.row_sampler import PendingStep, Sampled


class Executor:
    """Runs each step on one model runner, in this process. vLLM: `UniProcExecutor`.

    `minivllm.parallel` has the one whose steps several ranks run; it replaces the methods below.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def warm_up(self) -> None:
        self.runner.warm_up()

    def launch_model(self, output: SchedulerOutput) -> PendingStep:
        """Start a step's forward pass."""
        return self.runner.launch_model(output)

    def sample_tokens(self, step: PendingStep) -> Sampled:
        """Request id -> (token, logprobs) of a step that was launched; waits for them."""
        self.share_tokens()
        sampled = self.runner.sample_tokens(step)
        self.check()
        return sampled

    def share_tokens(self) -> None:
        """Give other ranks the tokens that they wait for: there are none."""

    def check(self) -> None:
        """EngineDeadError when a rank has ended; one rank alone never has."""

    def on_death(self, tell: Callable[[Callable[[], None]], object]) -> None:
        """When a rank ends, give `tell`, from a thread of its own, what raises the EngineDeadError."""

    def shutdown(self) -> None:
        """End the other ranks. What an executor ran cannot run again."""
