"""Steps of prompts from static buffers answer as eager steps do: padding, refills, the choice of graph.

Without a GPU a "captured" step just runs again, through Triton's interpreter, on the buffers it was made for.
"""

import itertools

import pytest
import torch
from test_runner_graphs import MIXED, Rerun, add, assert_tokens_are_right

from minivllm import SamplingParams
from minivllm.assembly import make_scheduler, parts_of
from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.gpu import cuda_graphs
from minivllm.gpu.cuda_graphs import mixed_sizes
from tests.tools.device import DEVICE, needs_cuda, no_waiting
from tests.tools.nights import without_gpu_at_night
from tests.worlds.engines import greedy, run, tiny_world, tokens_of
from tests.worlds.gpu import graph_steps
from tests.worlds.models import token_ids


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def watch_replays(engine):
    """`engine.replayed` lists the (tokens, with LoRA) of every step of prompts that ran as a graph."""
    engine.replayed = []
    graphs = engine.runner.graphs
    replay = graphs.replay

    def watched(shape):
        if shape in graphs.mixed:
            engine.replayed.append((shape.tokens, graphs.adapters_of_batch() > 0))
        return replay(shape)

    graphs.replay = watched


def graphed_engine(world, decode_graphs=False, **options):
    options = {
        "dtype": "float32",
        "max_num_seqs": 6,
        "max_loras": 4,
        "device": DEVICE,
        "max_num_batched_tokens": 40,
        **options,
    }
    engine = world.engine(**options)
    graph_steps(engine.runner, decodes=decode_graphs, wrapper=Rerun if DEVICE == "cpu" else None)
    watch_replays(engine)
    return engine


def prompt_steps(engine):
    """Every step that held a prompt of more than one token; the last of a prompt, alone, is as good as a decode."""
    return [record for record in engine.trace.records if any(row.tokens > 1 for row in record.rows)]


@pytest.mark.parametrize("backend", without_gpu_at_night(["auto"], "triton"))
def test_prompts_and_decodes_in_one_graph_give_the_tokens_of_each_request_alone(world, backend):
    engine = graphed_engine(world, punica_backend=backend, max_num_batched_tokens=20)

    add(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert len(engine.replayed) == len(prompt_steps(engine)) > 2
    assert any(record.rows[0].kind == "decode" != record.rows[-1].kind for record in engine.trace.records)


def test_no_step_that_somebody_decodes_in_is_too_large_for_a_graph(world, monkeypatch):
    """Prompts of 30 tokens that come one step after the other: alone they would be eager, beside a decode chunked."""
    monkeypatch.setattr(cuda_graphs, "MOST_TOKENS", 16)
    engine = graphed_engine(world, max_num_batched_tokens=64)
    engine.scheduler = bounded = make_scheduler(parts_of(engine.config), engine.runner, RequestQueues(), None)
    prompts = [token_ids(30, seed) for seed in range(3)]
    outputs = []
    for number, prompt in enumerate(prompts):
        bounded.add_request(Request(str(number), prompt, greedy(6)))
        outputs.append(bounded.schedule())
        bounded.update_from_output(outputs[-1], {s.request.request_id: [1] for s in outputs[-1].scheduled})

    assert [[s.num_new_tokens for s in output.scheduled] for output in outputs] == [[30], [1, 15], [1, 15]]


@pytest.mark.nightly_without_gpu
def test_both_kinds_of_graph_take_turns(world):
    engine = graphed_engine(world, decode_graphs=True, max_num_batched_tokens=8)

    add(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    assert {size for size, _ in engine.replayed} == {8}


def test_a_found_prefix_is_read_from_the_cache(world):
    engine = graphed_engine(world)
    prompt = token_ids(21, 5)
    engine.add_request("first", prompt, greedy(3), lora_request=world.request("qv"))
    run(engine)

    engine.add_request("second", [*prompt, 7], greedy(3), lora_request=world.request("qv"))
    output = run(engine)["second"]

    assert output.num_cached_tokens == 20
    assert tokens_of(output) == world.oracle().greedy("qv", [*prompt, 7], 3)
    assert len(engine.replayed) == 2


@pytest.mark.nightly_without_gpu
def test_requests_that_lose_their_blocks_and_get_others_are_read_anew(world):
    engine = graphed_engine(world, num_kv_blocks=11, enable_prefix_caching=False)
    names = [None, "qv", "all"]

    add(engine, world, names, max_tokens=8)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names, max_tokens=8)
    assert engine.get_metrics()["scheduler"]["num_preemptions"] > 0


def test_a_step_of_base_prompts_runs_without_a_trace_of_lora(world):
    engine = graphed_engine(world)

    for names in (["qv"], [None], ["mlp"]):
        add(engine, world, names)
        assert_tokens_are_right(world, run(engine), names)

    assert [with_lora for _, with_lora in engine.replayed] == [True, False, True]


def test_steps_that_are_too_large_or_want_many_logits_run_eagerly(world):
    engine = graphed_engine(world, max_num_batched_tokens=60)
    graphs = engine.runner.graphs
    graphs.mixed = [shape for shape in graphs.mixed if shape.tokens < 60]
    wishes = {"large": (token_ids(50, 1), {}), "logprobs": (token_ids(9, 2), {"prompt_logprobs": 1})}

    for name, (prompt, params) in wishes.items():
        engine.add_request(name, prompt, greedy(2, **params))
        tokens = tokens_of(run(engine)[name])
        assert tokens == world.oracle().greedy(None, prompt, 2)

    assert engine.replayed == []


def test_a_row_that_is_sampled_is_drawn_from_the_graphs_logits(world):
    answers = []
    for with_graphs in (True, False):
        engine = graphed_engine(world)
        if not with_graphs:
            engine.runner.graphs.mixed = []
        params = SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=5, ignore_eos=True)
        engine.add_request("a", token_ids(6, 1), params)
        answers.append(tokens_of(run(engine)["a"]))

    assert answers[0] == answers[1]


def test_the_backend_is_told_that_padding_is_base(world):
    """Tokens and samples are padded apart: a graph of 32 tokens samples from 6 rows."""
    engine = graphed_engine(world, punica_backend="triton")

    add(engine, world, ["qv", "all"])
    engine.step()

    punica = engine.runner.lora_manager.manager.punica_wrapper
    assert engine.replayed == [(32, True)]
    assert punica.token_lora_indices.tolist() == [0] * 3 + [1] * 7 + [-1] * 22
    assert punica.sampler_indices.tolist() == [0, 1, -1, -1, -1, -1]


def test_sizes_end_with_the_largest_step_and_pad_by_a_third_at_most():
    sizes = mixed_sizes(8192)

    assert sizes[-1] == 1024
    assert mixed_sizes(100) == [32, 64, 96, 100]
    assert mixed_sizes(20) == [20]
    assert all(larger - size <= max(32, size // 3) for size, larger in itertools.pairwise(sizes))
    assert 448 not in sizes, "on an H100 it takes longer than 512"


@needs_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_on_a_gpu_graphs_give_the_logits_of_eager_steps(world, dtype, backend):
    engine = world.engine(
        device="cuda",
        dtype=dtype,
        max_loras=4,
        punica_backend=backend,
        warm_up=True,
        max_num_batched_tokens=20,
        async_scheduling=False,  # eager steps want tokens
    )
    watch_replays(engine)
    runner, launch = engine.runner, engine.runner.launch_model

    def launch_twice(output):
        shapes, runner.graphs.mixed = runner.graphs.mixed, []
        eager = launch(output)
        eager_logits = None if eager.logits is None else eager.logits[: len(eager.requests)].clone()
        runner.graphs.mixed = shapes
        launched = launch(output)
        assert [r.request_id for r in launched.requests] == [r.request_id for r in eager.requests]
        if eager_logits is not None:
            logits = launched.logits[: len(eager_logits)]
            torch.testing.assert_close(logits, eager_logits, atol=0.05, rtol=0.05)
        return launched

    runner.launch_model = launch_twice
    add(engine, world, MIXED)
    run(engine)

    assert len(engine.replayed) == len(prompt_steps(engine)) > 0


@needs_cuda
def test_on_a_gpu_a_step_of_prompts_is_launched_without_waiting(world):
    engine = world.engine(device="cuda", dtype="bfloat16", max_loras=4, warm_up=True)
    launch = engine.runner.launch_model

    def launch_and_not_wait(output):
        with no_waiting():
            return launch(output)

    add(engine, world, ["qv", "all"])
    engine.step()  # loads the adapters
    engine.runner.launch_model = launch_and_not_wait
    engine.add_request("late", token_ids(12, 9), greedy(3), lora_request=world.request("qv"))

    assert len(run(engine)) == 3
