"""Ranks whose steps are "captured" on a CPU, so that their engine runs ahead: a captured step just runs again.

Run with a file descriptor it is such a rank, as `minivllm.distributed.follower` is one.
"""

import sys
from collections.abc import Callable
from typing import Any

from minivllm.distributed.rank_runner import RankRunner
from minivllm.worker.model_runner import ModelRunner


def rerun(step: Callable) -> Callable:
    step()
    return step


def capture(runner: RankRunner) -> None:
    """In the place of a warm-up: steps through the kernels that a GPU has, on addresses that stay."""
    runner.use_paged_attention = True
    runner.capture_mixed_steps(rerun)
    runner.capture_model(rerun)


def graph_all_ranks(monkeypatch: Any) -> None:
    """Of engines that are made from now on, with `warm_up`."""
    monkeypatch.setattr(ModelRunner, "warm_up", capture)
    monkeypatch.setattr("minivllm.distributed.other_ranks.FOLLOWER", "graphed_ranks")


if __name__ == "__main__":
    from minivllm.distributed.follower import main

    ModelRunner.warm_up = capture
    main(int(sys.argv[1]))
