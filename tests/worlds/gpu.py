"""What a GPU's engine has, on any device: steps that are "captured", and slots in pages."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from minivllm.gpu.fused import FusedLlamaModel, fuse
from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.paged_attention import build_paged_attention
from minivllm.gpu.step_graphs import StepGraphs
from minivllm.worker.model_runner import ModelRunner


def in_pages(b: list[torch.Tensor], ranks: torch.Tensor, page_ranks: int = 8) -> PagedPieces:
    """Pieces without A's, the pages dealt backwards.

    b      n x (S, N_i, R)
    ranks  (n, S) int32 live ranks
    """
    (slots, _, rank), heights = b[0].shape, tuple(one.shape[1] for one in b)
    pages_a_slot = -(-rank // page_ranks)
    count, stride = slots * pages_a_slot, page_ranks * sum(heights)
    pool = b[0].new_full((count, stride), torch.nan)
    table = torch.arange(count).flip(0).view(slots, pages_a_slot)
    firsts = [page_ranks * sum(heights[:i]) for i in range(len(b))]
    for one, first, of_slots in zip(b, firsts, ranks.tolist()):
        for slot, live in enumerate(of_slots):
            for page, rows in zip(table[slot], one[slot, :, :live].T.split(page_ranks)):
                pool[page, first : first + rows.numel()] = rows.flatten()
    of_pages = table.to(b[0].device, torch.int32), ranks, rank, page_ranks, stride, 1
    return PagedPieces(pool.flatten(), *of_pages, (0,) * len(b), tuple(firsts), (0,) * len(b), heights)


def rerun(step: Callable) -> Callable:
    step()
    return step


def graph_steps(
    runner: ModelRunner,
    *,
    decodes: bool = True,
    mixed: bool = True,
    wrapper: Callable[[Callable], Callable] | None = rerun,
) -> StepGraphs:
    """Give a runner captured steps, and attention that reads pages; None for `wrapper` makes CUDA graphs."""
    runner.build_attention = build_paged_attention(runner.config)
    if not isinstance(runner.model.model, FusedLlamaModel):  # no option of a CPU's engine asked for kernels
        fuse(runner.model)
    runner.graphs = StepGraphs(runner, decodes, mixed, wrapper)
    return runner.graphs


def capture(runner: ModelRunner) -> None:
    """In the place of a warm-up: steps through the kernels that a GPU has, on addresses that stay."""
    graph_steps(runner)


def graph_all_ranks(monkeypatch: Any) -> None:
    """Of engines that are made from now on, with `warm_up`."""
    monkeypatch.setattr(ModelRunner, "warm_up", capture)
    monkeypatch.setattr("minivllm.parallel.other_ranks.RANK_PROCESS", "tests.worlds.gpu")


if __name__ == "__main__":
    from minivllm.parallel.rank_process import main

    ModelRunner.warm_up = capture
    main(int(sys.argv[1]))
