"""What a model runner asks of captured steps, and the runner that has none.

Stands for vllm/v1/cudagraph_dispatcher.py (v0.22.1), which decides for each batch whether a graph runs it.
"""

from typing import Protocol

from minivllm.core.output import SchedulerOutput
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.row_sampler import PendingStep


class Graph(Protocol):
    """A captured step of a fixed size."""

    def padded(self, batch: InputBatch) -> InputBatch:
        """The batch and, as its last row, what fills the graph: a base row, because every row of a graph runs."""

    def run(self, batch: InputBatch) -> PendingStep:
        """Launch the step of a batch whose padded form has its adapters in their slots."""


class Graphs:
    """The captured steps of a runner: none.

    hold_most_steps   whether both decodes and steps that hold prompts were captured
    most_tokens       of the largest captured step that holds prompts; None = there is none
    """

    hold_most_steps = False
    most_tokens: int | None = None

    @property
    def captured(self) -> list[dict]:
        """What holds the graphs themselves."""
        return []

    def find(self, output: SchedulerOutput) -> Graph | None:
        """The graph that can run a step; None = it has to run eagerly."""
        return None


NO_GRAPHS = Graphs()
