"""An engine one step ahead of its tokens gives the tokens of one that is not, whatever happens between two steps.

Here a step is computed when it is launched, and its tokens come when they are waited for. tests/gpu has the graphs
that look up stand-ins on the device.
"""

import random

import pytest

from minivllm import SamplingParams
from minivllm.errors import EngineDeadError
from tests.worlds.ahead import WISHES, run_ahead
from tests.worlds.engines import greedy, run, tiny_world, tokens_of
from tests.worlds.models import token_ids


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def ahead_engine(world, **options):
    return run_ahead(world.engine(**options))


def test_tokens_are_those_of_each_request_alone(world):
    engine = ahead_engine(world)
    names = [None, "qv", "all", "mlp"]

    for i, name in enumerate(names):
        engine.add_request(
            str(i), token_ids(3 + 4 * i, i), greedy(4 + i), lora_request=world.request(name) if name else None
        )
    outputs = run(engine)

    for i, name in enumerate(names):
        assert tokens_of(outputs[str(i)]) == world.oracle().greedy(name, token_ids(3 + 4 * i, i), 4 + i)
    assert engine.ahead.left == len(engine.trace)


def test_outputs_come_one_step_later_and_are_whole(world):
    engine = ahead_engine(world)
    engine.add_request("a", token_ids(5, 1), greedy(3))
    expected = world.oracle().greedy(None, token_ids(5, 1), 3)

    steps = []
    while engine.has_unfinished_requests():
        steps.append([list(output.outputs[0].delta_token_ids) for output in engine.step()])

    assert steps == [[], [[expected[0]]], [[expected[1]]], [[expected[2]]]]


def test_a_request_that_stops_has_a_row_too_many_that_nobody_hears_of(world):
    prompt = token_ids(6, 2)
    expected = world.oracle().greedy("qv", prompt, 8)
    stop = expected[3]
    engine = ahead_engine(world)

    engine.add_request("a", prompt, greedy(8, stop_token_ids=[stop]), lora_request=world.request("qv"))
    output = run(engine)["a"]

    assert tokens_of(output) == expected[: expected.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert len(engine.trace) == expected.index(stop) + 2
    blocks = engine.scheduler.kv_cache.block_pool
    assert blocks.get_num_free_blocks() == blocks.num_usable_blocks


def test_the_last_token_by_number_that_would_also_stop_says_so(world):
    prompt = token_ids(6, 2)
    expected = world.oracle().greedy(None, prompt, 3)
    engine = ahead_engine(world)

    engine.add_request("a", prompt, greedy(3, stop_token_ids=[expected[2]]))
    output = run(engine)["a"]

    assert tokens_of(output) == expected
    stops_before = expected[2] in expected[:2]
    assert not stops_before
    assert output.outputs[0].finish_reason == "stop"


def test_rows_that_want_more_than_the_likeliest_token_hold_up_no_step(world):
    answers, logprobs = [], []
    for make in (world.engine, lambda **options: ahead_engine(world, **options)):
        engine = make()
        for i, (name, wish) in enumerate(WISHES.items()):
            params = SamplingParams(**{"max_tokens": 5 + i % 4, "ignore_eos": True} | wish)
            engine.add_request(name, token_ids(5, i), params)
        outputs = run(engine)
        answers.append({name: tokens_of(output) for name, output in outputs.items()})
        logprobs.append({name: output.outputs[0].logprobs for name, output in outputs.items()})

    assert answers[0] == answers[1]
    assert logprobs[0] == logprobs[1]
    assert len(logprobs[1]["logprobs"]) == 5 and logprobs[1]["greedy"] is None
    assert engine.ahead.left == len(engine.trace)


def test_a_row_too_many_of_a_request_that_drew_leaves_nothing_behind(world):
    params = SamplingParams(temperature=1.1, seed=4, max_tokens=8, ignore_eos=True)
    engine = world.engine()
    engine.add_request("a", token_ids(5, 1), params)
    drawn = tokens_of(run(engine)["a"])
    engine = ahead_engine(world)

    stop = SamplingParams(temperature=1.1, seed=4, max_tokens=8, ignore_eos=True, stop_token_ids=[drawn[3]])
    engine.add_request("a", token_ids(5, 1), stop)
    output = run(engine)["a"]

    assert tokens_of(output) == drawn[: drawn.index(drawn[3]) + 1]
    assert len(engine.trace) == drawn.index(drawn[3]) + 2
    assert not engine.runner.row_sampler.draws


def test_a_row_that_cannot_be_sampled_ends_alone(world):
    engine = ahead_engine(world)
    masks = engine.runner.row_sampler.masks
    engine.add_request("good", token_ids(5, 1), SamplingParams(temperature=0.8, seed=2, max_tokens=4))
    engine.add_request("bad", token_ids(6, 2), greedy(4))

    def of(requests, vocab_size):
        if any(request.request_id == "bad" and request.num_output_tokens == 2 for request in requests):
            raise ValueError("the structure of the answer cannot be followed")
        return [None] * len(requests)

    masks.of = of
    outputs = run(engine)

    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "cannot be followed" in outputs["bad"].error
    alone = world.engine()
    alone.add_request("good", token_ids(5, 1), SamplingParams(temperature=0.8, seed=2, max_tokens=4))
    assert tokens_of(outputs["good"]) == tokens_of(run(alone)["good"])


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read for an abort"])
def test_an_id_is_in_use_until_the_last_token_was_told(world, is_read):
    engine = ahead_engine(world)
    engine.add_request("a", token_ids(5, 1), greedy(1))
    assert engine.step() == []
    if is_read:
        engine.abort_request("another")

    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.add_request("a", token_ids(5, 2), greedy(1))

    assert tokens_of(run(engine)["a"]) == world.oracle().greedy(None, token_ids(5, 1), 1)


@pytest.mark.parametrize("stops", [False, True])
def test_a_request_that_a_pin_leaves_without_a_slot_has_all_of_its_tokens(world, stops):
    engine = ahead_engine(world, max_loras=1, max_cpu_loras=2)
    engine.add_lora(world.request("all"))
    [token] = world.oracle().greedy("qv", token_ids(5, 1), 1)
    params = SamplingParams(
        temperature=0, max_tokens=3, logprobs=1, ignore_eos=True, stop_token_ids=[token] if stops else []
    )
    engine.add_request("a", token_ids(5, 1), params, lora_request=world.request("qv"))
    assert engine.step() == []

    engine.pin_lora(world.request("all").lora_int_id)
    answer = run(engine)["a"].outputs[0]

    assert answer.token_ids == [token]
    assert [set(logprobs) >= {token} for logprobs in answer.logprobs] == [True]
    assert answer.finish_reason == ("stop" if stops else "error")


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_aborted_request_is_gone_and_the_others_go_on(world, steps):
    engine = ahead_engine(world)
    for name in ("stays", "goes"):
        engine.add_request(name, token_ids(5, len(name)), greedy(2 + 2 * (name == "stays")))
    outputs = [output for _ in range(steps) for output in engine.step()]

    engine.abort_request("goes")
    while engine.has_unfinished_requests():
        outputs += engine.step()

    tokens = [token for o in outputs if o.request_id == "stays" for token in o.outputs[0].delta_token_ids]
    assert tokens == world.oracle().greedy(None, token_ids(5, 5), 4)
    assert [o.request_id for o in outputs if o.finished and o.request_id == "goes"] == ["goes"] * (steps > 2)
    assert not engine.scheduler.requests
    engine.add_request("goes", token_ids(5, 4), greedy(2))
    assert tokens_of(run(engine)["goes"]) == world.oracle().greedy(None, token_ids(5, 4), 2)


def test_a_step_whose_tokens_cannot_be_read_ends_the_engine(world):
    """Its device is lost, and nobody can tell what else is."""
    engine = ahead_engine(world)
    engine.add_request("a", token_ids(4, 1), greedy(5))
    engine.step()

    engine.ahead.fail_next = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step()

    with pytest.raises(EngineDeadError, match=r"the device is lost.*make a new engine"):
        engine.step()


@pytest.mark.parametrize("after", range(1, 5))
def test_a_pass_that_fails_ends_its_requests_with_the_tokens_of_the_step_before(world, after):
    engine = ahead_engine(world)
    names = [None, "qv", "all"]
    for i, name in enumerate(names):
        engine.add_request(str(i), token_ids(4 + i, i), greedy(3 + i), lora_request=world.request(name))
    outputs = {}
    for _ in range(after):
        outputs |= {output.request_id: output for output in engine.step()}
    launch = engine.runner.launch_model

    def fail(output):
        raise RuntimeError("no launch")

    engine.runner.launch_model = fail
    outputs |= {output.request_id: output for output in engine.step()}
    engine.runner.launch_model = launch

    assert not engine.has_unfinished_requests()
    for i, name in enumerate(names):
        tokens = world.oracle().greedy(name, token_ids(4 + i, i), 3 + i)[:after]
        assert tokens_of(outputs[str(i)]) == tokens
        assert outputs[str(i)].outputs[0].finish_reason == ("error" if len(tokens) < 3 + i else "length")
    engine.add_request("b", token_ids(4, 1), greedy(3), lora_request=world.request("qv"))
    assert tokens_of(run(engine)["b"]) == world.oracle().greedy("qv", token_ids(4, 1), 3)


def play(engine, world, seed):
    """A history of arrivals, aborts and unloads between steps; what each request was told, in all."""
    rng = random.Random(seed)
    told, ended, aborted, count = {}, set(), set(), 0
    for _ in range(400):
        if count < 14 and rng.random() < 0.5:
            name = rng.choice([None, *world.names])
            prompt = token_ids(rng.randint(1, 22), rng.randrange(4))
            stops = rng.sample(range(3, 97), rng.choice([0, 25]))
            drawn = rng.choice([{"temperature": 0}] * 7 + [{"temperature": 0.8, "seed": 5, "n": 2}])
            params = SamplingParams(
                max_tokens=rng.randint(1, 9), stop_token_ids=stops, ignore_eos=True, **drawn
            )
            engine.add_request(str(count), prompt, params, lora_request=world.request(name) if name else None)
            count += 1
        if rng.random() < 0.06 and count:
            victim = str(rng.randrange(count))
            engine.abort_request(victim)
            aborted.add(victim)
        # Unused as far as the scheduler knows: with the last token of a request still to be read, perhaps.
        unused = rng.randint(1, 4)
        if unused in engine.list_loras() and unused not in engine.scheduler.in_flight:
            engine.remove_lora(unused)
        for output in engine.step():
            for completion in output.outputs:
                told.setdefault((output.request_id, completion.index), []).extend(completion.delta_token_ids)
            if output.finished:
                ended.add(output.request_id)
        if count == 14 and not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests()
    return told, ended, aborted


@pytest.mark.parametrize("seed", range(1, 6))
def test_any_history_tells_what_an_engine_that_waits_tells(world, seed):
    """Few blocks and slots, so that requests are preempted; an aborted one may have been told more or less."""
    options = {"num_kv_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 9}
    waiting, ahead = world.engine(**options), ahead_engine(world, **options)

    expected, ended, aborted = play(waiting, world, seed)
    told, ended_ahead, _ = play(ahead, world, seed)

    for (request_id, index), tokens in expected.items():
        if request_id not in aborted:
            assert told[request_id, index] == tokens
    assert ended - aborted == ended_ahead - aborted
    assert ahead.ahead.left > 5
    assert ahead.get_metrics()["scheduler"]["num_preemptions"] > 0
    for engine in (waiting, ahead):
        blocks = engine.scheduler.kv_cache.block_pool
        assert blocks.get_num_free_blocks() == blocks.num_usable_blocks
        assert not engine.scheduler.in_flight
