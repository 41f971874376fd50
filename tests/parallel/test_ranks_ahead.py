"""Ranks one step ahead of their tokens: what rank 0 draws the others have on their devices when the next step needs it.

Without a GPU a "captured" step just runs again, through Triton's interpreter.
"""

import pytest

from minivllm import SamplingParams
from tests.worlds.ahead import WISHES
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.gpu import graph_all_ranks
from tests.worlds.models import token_ids
from tests.worlds.processes import all_end, dies_in_a_step, group_is_left, kill_rank, rank_pids

OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_loras": 4}


@pytest.fixture
def ranks(world, monkeypatch):
    """Of two ranks. `told` has what the others heard of each step: rows whose tokens they get. `left` counts the steps
    that were left unread when the next one was scheduled."""
    graph_all_ranks(monkeypatch)
    engine = world.engine(**OPTIONS, tensor_parallel_size=2, threads=1, warm_up=True)
    pids = rank_pids(engine)[1:]
    engine.told, engine.left = [], 0
    tokens = engine.core.tokens
    tell, leave = engine.executor.others.tell, tokens.leave

    def watched(name, *args):
        if name == "launch":
            engine.told.append(args[-1])
        return tell(name, *args)

    def left(step):
        wait = leave(step)
        engine.left += wait is not None
        return wait

    engine.executor.others.tell, tokens.leave = watched, left
    yield engine
    engine.executor.shutdown()
    all_end(pids)
    group_is_left()


def ask(engine, world, wishes, max_tokens=7):
    for i, (name, wish) in enumerate(wishes.items()):
        params = SamplingParams(**{"max_tokens": max_tokens + i % 3, "ignore_eos": True} | wish)
        lora = world.request([None, *world.names][i % 3])
        engine.add_request(name, token_ids(3 + 2 * i, i), params, lora_request=lora)
    return {name: tokens_of(output) for name, output in run(engine).items()}


@pytest.mark.nightly
def test_drawn_tokens_are_those_of_one_rank_that_waits_for_each(world, ranks):
    alone = world.engine(**OPTIONS)

    assert ask(ranks, world, WISHES) == ask(alone, world, WISHES)
    assert ranks.left == len(ranks.trace)
    assert any(ranks.told)


@pytest.mark.nightly
def test_greedy_steps_share_nothing(world, ranks):
    ranks.add_request("a", token_ids(5, 1), greedy(6), lora_request=world.request("qv"))
    outputs = run(ranks)

    assert tokens_of(outputs["a"]) == world.oracle().greedy("qv", token_ids(5, 1), 6)
    assert ranks.told == [0] * len(ranks.told)
    assert ranks.left == len(ranks.trace)


@pytest.mark.nightly
def test_what_was_announced_is_shared_also_if_the_step_breaks_off_before_it_is_drawn(
    world, ranks, monkeypatch
):
    """The others wait for it: whatever came next would be taken for it."""
    drawn = {"a": WISHES["drawn"], "b": WISHES["filtered"]}
    expected = ask(world.engine(**OPTIONS), world, drawn)
    tokens = ranks.core.tokens
    leave, calls = tokens.leave, []

    def broken(step):
        calls.append(step)
        if len(calls) == 2:
            raise RuntimeError("in the middle")
        return leave(step)

    tokens.leave = broken
    for i, (name, wish) in enumerate(drawn.items()):
        params = SamplingParams(**{"max_tokens": 7 + i % 3, "ignore_eos": True} | wish)
        ranks.add_request(f"{name} first", token_ids(3 + 2 * i, i), params)
    ended = run(ranks)

    assert len(calls) >= 2
    assert {output.outputs[0].finish_reason for output in ended.values()} == {"error"}
    tokens.leave = leave
    assert ask(ranks, world, drawn) == expected


@pytest.mark.nightly
def test_a_rank_that_is_killed_while_tokens_are_drawn_ends_the_engine(ranks):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True)
    for i in range(3):
        ranks.add_request(str(i), token_ids(4 + i, i), params)
    for _ in range(4):
        ranks.step()
    group = ranks.runner.tp
    broadcast = group.broadcast

    def kill_and_broadcast(tokens):
        kill_rank(ranks, 1)
        broadcast(tokens)

    group.broadcast = kill_and_broadcast

    dies_in_a_step(ranks, r"rank 1 of 2 has ended \(killed by signal 9\)")
