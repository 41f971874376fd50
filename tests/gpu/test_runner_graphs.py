"""Decode steps from static buffers answer as eager steps do: padding, refills, the choice of graph.

Without a GPU a "captured" step just runs again, through Triton's interpreter, on the buffers it was made for.
"""

import pytest
import torch

from minivllm import SamplingParams
from minivllm.gpu.cuda_graphs import capture_sizes
from minivllm.gpu.step_graphs import NO_ADAPTERS
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.nights import without_gpu_at_night
from tests.worlds.engines import greedy, run, tiny_world, tokens_of
from tests.worlds.gpu import graph_steps
from tests.worlds.models import token_ids


class Rerun:
    """Stands in for a captured graph: the same launches on the same addresses."""

    def __init__(self, step):
        self.step = step
        step()

    def __call__(self):
        return self.step()


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def paged_engine(world, graphs=True, **options):
    """An engine on the paged kernels in float32, whose tokens can be held against float64's.

    `engine.replayed` lists the (size, with LoRA) of every step that ran as a graph.
    """
    options = {"dtype": "float32", "max_num_seqs": 6, "max_loras": 4, "device": DEVICE, **options}
    engine = world.engine(**options)
    engine.replayed = []
    graph_steps(engine.runner, decodes=graphs, mixed=False, wrapper=Rerun if DEVICE == "cpu" else None)
    if graphs:
        watch_replays(engine)
    return engine


def watch_replays(engine):
    engine.replayed = []
    graphs = engine.runner.graphs
    replay = graphs.replay

    def watched(shape):
        if shape in graphs.decodes:
            engine.replayed.append((shape.tokens, graphs.adapters_of_batch()))
        return replay(shape)

    graphs.replay = watched


def compare_with_eager(engine, tolerance):
    """Run every step twice, first eagerly, and hold the graph's logits against those. Prompts have no graphs here."""
    runner, launch = engine.runner, engine.runner.launch_model
    runner.graphs.mixed = []

    def launch_twice(output):
        shapes, runner.graphs.decodes = runner.graphs.decodes, []
        eager = launch(output)
        runner.graphs.decodes = shapes
        launched = launch(output)
        rows = len(eager.requests)
        assert [r.request_id for r in launched.requests] == [r.request_id for r in eager.requests]
        if rows:
            assert not launched.logits[:rows].isnan().any()
            torch.testing.assert_close(launched.logits[:rows], eager.logits, atol=tolerance, rtol=tolerance)
        return launched

    runner.launch_model = launch_twice


def decode_only_steps(engine):
    """Rows of every step that held nothing but decodes."""
    records = engine.trace.records
    return [len(record.rows) for record in records if all(row.kind == "decode" for row in record.rows)]


MIXED = [None, "qv", "all", None, "mlp"]


def add(engine, world, names, max_tokens=4, **params):
    """Requests of unlike lengths, prompts and answers."""
    for i, name in enumerate(names):
        options = greedy(max_tokens + i, **params)
        engine.add_request(str(i), token_ids(3 + 4 * i, i), options, lora_request=world.request(name))


def assert_tokens_are_right(world, outputs, names, max_tokens=4):
    for i, name in enumerate(names):
        expected = world.oracle().greedy(name, token_ids(3 + 4 * i, i), max_tokens + i)
        assert tokens_of(outputs[str(i)]) == expected, f"{i}: {name}"


@pytest.mark.parametrize("backend", without_gpu_at_night(["auto"], "triton"))
def test_padded_steps_give_the_tokens_of_each_request_alone(world, backend):
    engine = paged_engine(world, punica_backend=backend)

    add(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert [size for size, _ in engine.replayed] == [
        {1: 1, 2: 2, 3: 4, 4: 4, 5: 6}[rows] for rows in decode_only_steps(engine)
    ]
    assert len({size for size, _ in engine.replayed}) == 4, "the batch did not pass through all sizes"


@pytest.mark.nightly_without_gpu
def test_the_highest_slot_counts_beside_base_rows_in_a_captured_step(world):
    """Incident 13: as many adapters as slots, and base rows that the count forgot."""
    engine = paged_engine(world, punica_backend="triton", max_loras=2, max_num_seqs=3)
    names = ["mlp", None, "all"]

    add(engine, world, names, max_tokens=4)
    outputs = run(engine)

    full = [
        record
        for record in engine.trace.records
        if len(record.rows) == 3 and all(row.kind == "decode" for row in record.rows)
    ]
    assert full and all(None not in record.slots for record in full), "no step had every slot in use"
    assert engine.replayed.count((3, True)) == len(full)
    assert_tokens_are_right(world, outputs, names, max_tokens=4)


@pytest.mark.parametrize(("names", "with_lora"), [([None, None], False), (["qv", None], True)], ids=str)
def test_a_batch_without_adapters_runs_the_graph_without_lora(world, names, with_lora):
    engine = paged_engine(world)

    add(engine, world, names, max_tokens=4)
    engine.step()
    engine.step()

    assert [(size, bool(kind)) for size, kind in engine.replayed] == [(2, with_lora)]


@pytest.mark.nightly_without_gpu
def test_after_a_batch_with_adapters_comes_one_without_and_back(world):
    engine = paged_engine(world)

    for names in (["qv", "all"], [None, None], ["mlp", "qv"]):
        add(engine, world, names)
        assert_tokens_are_right(world, run(engine), names)

    assert {bool(with_lora) for _, with_lora in engine.replayed} == {True, False}


def test_without_lora_there_is_one_set_of_graphs(world):
    engine = paged_engine(world, enable_lora=False)

    add(engine, world, [None] * 3)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, [None] * 3)
    graphs = engine.runner.graphs
    assert [shape.tokens for shape in graphs.decodes] == [1, 2, 4, 6]
    assert graphs.steps.keys() == {(shape, NO_ADAPTERS) for shape in graphs.decodes}


@pytest.mark.nightly_without_gpu
def test_prompts_and_chunks_run_eagerly_beside_decodes(world):
    engine = paged_engine(world, max_num_batched_tokens=5)

    add(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    # The last token of a prompt may come alone, and is then computed as a decode is.
    alone = [r for r in engine.trace.records if all(row.tokens == 1 for row in r.rows)]
    assert len(decode_only_steps(engine)) <= len(engine.replayed) <= len(alone) < len(engine.trace)


@pytest.mark.nightly_without_gpu
def test_requests_that_lose_their_blocks_and_get_others_are_read_anew(world):
    engine = paged_engine(world, num_kv_blocks=11, enable_prefix_caching=False)
    names = [None, "qv", "all"]

    add(engine, world, names, max_tokens=8)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names, max_tokens=8)
    assert engine.get_metrics()["scheduler"]["num_preemptions"] > 0
    assert engine.replayed


WISHES = {
    "sampled": {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize(
    "wishes",
    [
        pytest.param(["sampled"], marks=pytest.mark.nightly_without_gpu),
        pytest.param(["logprobs"], marks=pytest.mark.nightly_without_gpu),
        ["sampled", "logprobs", "greedy"],
    ],
    ids=str,
)
@pytest.mark.nightly_without_gpu
def test_rows_that_want_more_than_the_likeliest_token_get_it_from_the_logits(world, wishes):
    outputs = []
    for graphs in (True, False):
        engine = paged_engine(world, graphs)
        for i, wish in enumerate(wishes):
            params = SamplingParams(max_tokens=5, ignore_eos=True, **WISHES[wish])
            engine.add_request(wish, token_ids(6, i), params, lora_request=world.request("all"))
        outputs.append(run(engine))
        assert bool(engine.replayed) == graphs

    for wish in wishes:
        graphed, eager = (output[wish].outputs[0] for output in outputs)
        assert graphed.token_ids == eager.token_ids
        assert (graphed.logprobs is not None) == (wish == "logprobs")
        for one, other in zip(graphed.logprobs or [], eager.logprobs or [], strict=True):
            assert one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)


@pytest.mark.nightly_without_gpu
def test_the_backend_is_told_that_padding_is_base(world):
    """Else the rows of a larger step before would still be some adapter's, and cost it its kernels' time."""
    engine = paged_engine(world, punica_backend="triton")

    add(engine, world, ["qv", "all", "mlp"])
    engine.step()
    engine.step()

    punica = engine.runner.lora_manager.manager.punica_wrapper
    assert engine.replayed == [(4, 1)]
    assert punica.token_lora_indices.tolist() == [0, 1, 2, -1]
    assert punica.sampler_indices.tolist() == [0, 1, 2, -1]


def test_a_row_that_may_not_stop_yet_does_not(world):
    """The likeliest token that the graph has found may be one that `min_tokens` forbids."""
    prompt = token_ids(6, 1)
    second = world.oracle().greedy("qv", prompt, 2)[1]
    engine = paged_engine(world)

    params = greedy(4, min_tokens=3, stop_token_ids=[second])
    engine.add_request("a", prompt, params, lora_request=world.request("qv"))
    tokens = tokens_of(run(engine)["a"])

    assert second not in tokens[:3]


def test_sizes_are_close_where_padding_costs_most_and_end_with_the_largest_batch():
    small = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]

    assert capture_sizes(128) == small
    assert capture_sizes(200) == [*small, 160, 192, 200]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(1) == [1]


def test_capturing_leaves_no_adapter_behind(world):
    engine = paged_engine(world)

    info = engine.debug_info()

    assert info["slots"] == [None] * 4
    assert info["adapters"] == []


@needs_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_on_a_gpu_graphs_give_the_logits_of_eager_steps(world, dtype, backend):
    options = {
        "punica_backend": backend,
        "warm_up": True,
        "async_scheduling": False,
    }  # eager steps want tokens
    engine = world.engine(device="cuda", dtype=dtype, max_loras=4, **options)
    watch_replays(engine)
    compare_with_eager(engine, tolerance=0.05)

    add(engine, world, MIXED)
    run(engine)

    assert len(engine.replayed) == len(decode_only_steps(engine)) > 0


@needs_cuda
def test_on_a_gpu_all_sampled_rows_are_drawn_together(world):
    """The numbers come from the same CPU generators, so the tokens are the CPU's."""
    answers = []
    for device in ("cpu", "cuda"):
        engine = world.engine(device=device, dtype="float32", max_loras=4)
        for i in range(6):
            params = SamplingParams(
                temperature=1.2, seed=i, top_p=0.9, top_k=30, max_tokens=6, ignore_eos=True
            )
            engine.add_request(str(i), token_ids(6, i), params)
        answers.append({i: tokens_of(output) for i, output in run(engine).items()})

    assert answers[0] == answers[1]


@needs_cuda
def test_on_a_gpu_the_cache_takes_what_is_left_and_no_more_than_is_useful(world):
    engine = world.engine(
        device="cuda", dtype="float16", num_kv_blocks=None, max_num_seqs=4, max_model_len=64
    )

    assert engine.runner.num_blocks == 4 * 64 // 4 + 1


def test_no_graph_has_more_rows_than_a_step_may_have_tokens(world):
    engine = paged_engine(world, max_num_batched_tokens=3, max_num_seqs=6)

    assert [shape.tokens for shape in engine.runner.graphs.decodes] == [1, 2, 3]
