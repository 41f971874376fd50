"""Ranks whose steps are "captured" on a CPU, so that their engine runs ahead: a captured step just runs again.

Run with a file descriptor it is such a rank, as `minivllm.parallel.rank_process` is one.
"""

import sys
from typing import Any

from graphed import graph_steps

from minivllm.worker.model_runner import ModelRunner


def capture(runner: ModelRunner) -> None:
    """In the place of a warm-up: steps through the kernels that a GPU has, on addresses that stay."""
    graph_steps(runner)


def graph_all_ranks(monkeypatch: Any) -> None:
    """Of engines that are made from now on, with `warm_up`."""
    monkeypatch.setattr(ModelRunner, "warm_up", capture)
    monkeypatch.setattr("minivllm.parallel.other_ranks.RANK_PROCESS", "graphed_ranks")


if __name__ == "__main__":
    from minivllm.parallel.rank_process import main

    ModelRunner.warm_up = capture
    main(int(sys.argv[1]))
