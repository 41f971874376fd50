"""What a GPU's engine has, on any device: steps that are "captured", and slots in pages."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from minivllm import LLMEngine
from minivllm.gpu.fused import FusedLlamaModel, fuse
from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.paged_attention import build_paged_attention
from minivllm.gpu.step_buffers import StepShape
from minivllm.gpu.step_graphs import StepGraphs
from minivllm.worker.model_runner import ModelRunner
from tests.tools.device import DEVICE
from tests.worlds.engines import greedy, tokens_of
from tests.worlds.models import token_ids


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
    """Stands for a captured graph: the same launches on the same addresses."""
    step()
    return step


def graph_steps(runner: ModelRunner, *, decodes: bool = True, mixed: bool = True) -> StepGraphs:
    """Give a runner captured steps, and attention that reads pages. Without a GPU a "captured" step just runs again."""
    runner.build_attention = build_paged_attention(runner.config)
    if not isinstance(runner.model.model, FusedLlamaModel):  # no option of a CPU's engine asked for kernels
        fuse(runner.model)
    runner.graphs = StepGraphs(runner, decodes, mixed, None if runner.on_gpu else rerun)
    return runner.graphs


def watch_replays(engine: LLMEngine, kind: str = "decodes") -> None:
    """`engine.replayed` lists the (tokens, kind of adapters) of every step of `kind` that ran as a graph."""
    graphs, engine.replayed = engine.runner.graphs, []
    replay = graphs.replay

    def watched(shape: StepShape) -> Any:
        if shape in getattr(graphs, kind):
            engine.replayed.append((shape.tokens, graphs.adapters_of_batch()))
        return replay(shape)

    graphs.replay = watched


def graphed_engine(world: Any, *kinds: str, **options: object) -> LLMEngine:
    """An engine on paged kernels in float32, whose tokens can be held against float64's.

    kinds   of steps that are captured: "decodes", "mixed"; the last one is watched
    """
    options = {"dtype": "float32", "max_num_seqs": 6, "max_loras": 4, "device": DEVICE, **options}
    engine = world.engine(**options)
    engine.replayed = []
    graph_steps(engine.runner, **{kind: kind in kinds for kind in ("decodes", "mixed")})
    if kinds:
        watch_replays(engine, kinds[-1])
    return engine


def compare_with_eager(engine: LLMEngine, tolerance: float, kind: str = "decodes") -> None:
    """Every step runs twice, first eagerly, and has the same logits. Only steps of `kind` have graphs."""
    runner, launch = engine.runner, engine.runner.launch_model
    for other in {"decodes", "mixed"} - {kind}:
        setattr(runner.graphs, other, [])

    def launch_twice(output: Any) -> Any:
        shapes = getattr(runner.graphs, kind)
        setattr(runner.graphs, kind, [])
        eager = launch(output)
        rows = len(eager.requests)
        logits = eager.logits[:rows].clone() if rows else None
        setattr(runner.graphs, kind, shapes)
        launched = launch(output)
        assert [r.request_id for r in launched.requests] == [r.request_id for r in eager.requests]
        if rows:
            assert not launched.logits[:rows].isnan().any()
            torch.testing.assert_close(launched.logits[:rows], logits, atol=tolerance, rtol=tolerance)
        return launched

    runner.launch_model = launch_twice


MIXED = [None, "qv", "all", None, "mlp"]


def add_requests(
    engine: LLMEngine, world: Any, names: list[str | None], max_tokens: int = 4, **params: object
) -> None:
    """Requests of unlike lengths, prompts and answers."""
    for i, name in enumerate(names):
        options = greedy(max_tokens + i, **params)
        engine.add_request(str(i), token_ids(3 + 4 * i, i), options, lora_request=world.request(name))


def assert_tokens_are_right(world: Any, outputs: dict, names: list[str | None], max_tokens: int = 4) -> None:
    for i, name in enumerate(names):
        expected = world.oracle().greedy(name, token_ids(3 + 4 * i, i), max_tokens + i)
        assert tokens_of(outputs[str(i)]) == expected, f"{i}: {name}"


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
