"""One forward pass for a batch that mixes adapters, base, prompts, chunks and decodes (lab 7.3)."""

import pytest
import torch
from hand_made_steps import make_output, make_request

from minivllm.worker.input_batch import InputBatch
from tests.oracles.recorded import RecordedWorld
from tests.worlds.models import token_ids

lab = pytest.mark.lab("7.3")


@pytest.fixture
def world():
    return RecordedWorld()


@pytest.fixture
def runner(world):
    return world.engine(max_loras=4, block_size=4).runner


class Steps:
    """Plays the scheduler: gives out blocks, takes tokens in."""

    def __init__(self, runner, world):
        self.runner, self.world = runner, world
        self.next_block = 1
        self.requests = {}

    def add(self, name, adapter, prompt, **params):
        blocks = range(self.next_block, self.next_block + 10)
        self.next_block += 10
        request = make_request(name, prompt, self.world.request(adapter), blocks, **params)
        self.requests[name] = request
        return request

    def run(self, without_tokens=(), **tokens):
        """Compute so many tokens of each request; what the runner sampled."""
        scheduled = [(self.requests[name], count) for name, count in tokens.items()]
        sampled = self.runner.execute_model(
            make_output(*scheduled, idle=[self.requests[name] for name in without_tokens])
        )
        for request, count in scheduled:
            request.num_computed_tokens += count
            if request.request_id in sampled:
                request.append_output_token(sampled[request.request_id][0])
        return sampled


@pytest.fixture
def steps(runner, world):
    return Steps(runner, world)


@lab
def test_every_row_gets_the_token_of_its_own_adapter(world, steps):
    prompt = token_ids(9, 1)
    for name in [None, *world.names]:
        steps.add(str(name), name, prompt)

    sampled = steps.run(**{str(name): 9 for name in [None, *world.names]})

    expected = {str(name): world.oracle().greedy(name, prompt, 1)[0] for name in [None, *world.names]}
    assert {name: token for name, (token, _) in sampled.items()} == expected
    assert len(set(expected.values())) > 2, "the adapters do not differ here"


@lab
def test_what_the_model_is_given_lies_on_the_runners_device(runner):
    """On the device "meta", which has shapes only, as a stand-in for a GPU. Nobody samples here."""
    request = make_request("chunk", [5, 6, 7], block_ids=[1])
    batch = InputBatch.from_scheduler_output(make_output((request, 2)))
    runner.device, runner.build_attention = torch.device("meta"), lambda *lists: lists

    input_ids, positions, attn, last_rows = runner._prepare_inputs(batch)

    made = [(tensor.device.type, tensor.dtype, len(tensor)) for tensor in (input_ids, positions, last_rows)]
    assert made == [("meta", torch.int64, 2), ("meta", torch.int64, 2), ("meta", torch.int64, 0)]
    assert attn == ([2], [2], [[1]]), "tokens, context lengths and block tables of the rows"


@lab
def test_prompts_chunks_and_decodes_share_a_step(world, steps):
    prompts = {"decoding": token_ids(5, 1), "chunked": token_ids(11, 2), "new": token_ids(3, 3)}
    adapters = {"decoding": "all", "chunked": "mlp", "new": None}
    steps.add("decoding", "all", prompts["decoding"])
    steps.add("chunked", "mlp", prompts["chunked"])
    steps.run(decoding=5, chunked=6)
    steps.add("new", None, prompts["new"])

    steps.run(decoding=1, new=3, chunked=5)

    for name, adapter in adapters.items():
        request = steps.requests[name]
        expected = world.oracle().greedy(adapter, prompts[name], len(request.output_token_ids))
        assert request.output_token_ids == expected, name
    assert [len(request.output_token_ids) for request in steps.requests.values()] == [2, 1, 1]


@lab
def test_a_step_that_samples_nothing_still_fills_the_cache(world, steps):
    prompt = token_ids(10, 4)
    steps.add("a", "all", prompt)

    assert steps.run(a=6) == {}

    assert steps.run(a=4)["a"][0] == world.oracle().greedy("all", prompt, 1)[0]


@lab
def test_a_running_request_without_tokens_is_left_as_it_is(world, steps):
    steps.add("idle", "qv", token_ids(6, 5))
    steps.add("busy", "all", token_ids(6, 6))
    steps.run(idle=6, busy=6)

    assert steps.run(without_tokens=["idle"], busy=1).keys() == {"busy"}

    steps.run(idle=1, busy=1)
    for name, adapter, seed in (("idle", "qv", 5), ("busy", "all", 6)):
        tokens = steps.requests[name].output_token_ids
        assert tokens == world.oracle().greedy(adapter, token_ids(6, seed), len(tokens))


@lab
def test_the_order_of_rows_does_not_matter(world, steps):
    prompts = {name: token_ids(7, seed) for seed, name in enumerate(world.names)}
    for name, prompt in prompts.items():
        steps.add(name, name, prompt)

    steps.run(**dict.fromkeys(reversed(world.names), 7))
    steps.run(**dict.fromkeys(world.names, 1))
    steps.run(**dict.fromkeys(sorted(world.names), 1))

    for name, prompt in prompts.items():
        assert steps.requests[name].output_token_ids == world.oracle().greedy(name, prompt, 3)


@lab
def test_an_engine_without_lora_runs_the_base_model(world):
    steps = Steps(world.engine(enable_lora=False).runner, world)
    prompt = token_ids(8, 7)
    steps.add("a", None, prompt)

    assert steps.run(a=8)["a"][0] == world.oracle().greedy(None, prompt, 1)[0]


@lab
def test_logprobs_come_for_those_who_asked(steps):
    steps.add("with", "qv", token_ids(4, 8), logprobs=2)
    steps.add("without", "all", token_ids(4, 9))

    sampled = steps.run(**{"with": 4, "without": 4})

    token, logprobs = sampled["with"]
    assert token in logprobs and 2 <= len(logprobs) <= 3
    assert sampled["without"][1] is None


def test_a_seeded_request_draws_on_where_it_stopped(steps):
    """Its generator is kept from step to step, and dropped when the request is forgotten."""
    for name in ("a", "b"):
        steps.add(name, "qv", token_ids(5, 3), temperature=1.0, seed=4)
    steps.run(a=5)
    tokens = [steps.run(a=1)["a"][0] for _ in range(6)]

    steps.run(b=5)
    again = [steps.run(b=1)["b"][0] for _ in range(6)]

    assert tokens == again
    assert len(set(tokens)) > 1
    steps.runner.forget_request("a")
    assert set(steps.runner.row_sampler.draws) == {"b"}


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 2, "block_size": 16, "max_num_seqs": 1}])
def test_warming_up_leaves_no_trace(world, options):
    engine = world.engine(warm_up=True, **options)

    info = engine.debug_info()

    assert info["slots"] == [None, None]
    assert info["adapters"] == []
    assert info["metrics"]["lora"]["loads"] == info["metrics"]["lora"]["activations"] == 0
    assert info["metrics"]["steps"] == 0
