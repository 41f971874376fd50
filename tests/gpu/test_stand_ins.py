"""Captured steps look up on the device the tokens that the host does not know yet."""

import pytest

from minivllm.ahead.lookahead import LookaheadCore
from tests.tools.device import needs_cuda
from tests.worlds.ahead import with_lookahead
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.gpu import MIXED, add_requests, assert_tokens_are_right, graphed_engine
from tests.worlds.models import token_ids


def ahead_engine(world, **options):
    """`engine.sent` has what steps were given as token ids, stand-ins among them."""
    engine = with_lookahead(
        graphed_engine(world, "decodes", "mixed", **{"max_num_batched_tokens": 40, **options})
    )
    engine.sent = []
    note_token_ids(engine.runner.graphs.buffers, engine.sent)
    return engine


def note_token_ids(buffers, sent):
    fill = buffers.fill

    def noted(token_ids, *others):
        sent.append(list(token_ids))
        fill(token_ids, *others)

    buffers.fill = noted


@pytest.mark.nightly_without_gpu
def test_decodes_go_on_from_tokens_that_the_host_has_not_read(world):
    engine = ahead_engine(world)

    add_requests(engine, world, MIXED)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, MIXED)
    decodes = [ids for ids in engine.sent if len(ids) < 6]
    assert decodes
    assert all(token < 0 for ids in decodes for token in ids)


def test_prompts_join_decodes_whose_tokens_are_not_read(world):
    engine, names = ahead_engine(world, max_num_batched_tokens=8), ["qv", None, "all"]

    add_requests(engine, world, names, max_tokens=2)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names, max_tokens=2)
    assert any(min(ids) < 0 <= max(ids) for ids in engine.sent)


@pytest.mark.nightly_without_gpu
def test_a_preempted_request_ends_with_a_stand_in_when_it_comes_back(world):
    engine = ahead_engine(world, num_kv_blocks=11, enable_prefix_caching=False)
    names = [None, "qv", "all"]

    add_requests(engine, world, names, max_tokens=8)
    outputs = run(engine)

    assert_tokens_are_right(world, outputs, names, max_tokens=8)
    assert engine.get_metrics()["scheduler"]["num_preemptions"] > 0


@pytest.mark.nightly_without_gpu
def test_a_step_that_no_graph_can_run_is_given_the_tokens(world):
    engine = ahead_engine(world, max_num_batched_tokens=60)
    graphs = engine.runner.graphs
    graphs.mixed = [shape for shape in graphs.mixed if shape.tokens <= 32]
    engine.add_request("a", token_ids(6, 1), greedy(8))
    engine.step()
    engine.step()

    engine.add_request("large", token_ids(50, 2), greedy(2))
    outputs = run(engine)

    assert tokens_of(outputs["a"]) == world.oracle().greedy(None, token_ids(6, 1), 8)
    assert tokens_of(outputs["large"]) == world.oracle().greedy(None, token_ids(50, 2), 2)


@needs_cuda
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_on_a_gpu_a_step_ahead_changes_no_token(world, backend):
    answers = []
    for async_scheduling in (False, True):
        engine = world.engine(
            device="cuda",
            dtype="bfloat16",
            max_loras=2,
            punica_backend=backend,
            warm_up=True,
            async_scheduling=async_scheduling,
        )
        assert (type(engine.core) is LookaheadCore) == async_scheduling
        for i in range(24):
            name = [None, *world.names][i % 5]
            params = greedy(3 + i % 7, stop_token_ids=list(range(3, 9)))
            engine.add_request(str(i), token_ids(3 + i, i), params, lora_request=world.request(name))
        answers.append({name: tokens_of(output) for name, output in run(engine).items()})

    assert answers[0] == answers[1]
