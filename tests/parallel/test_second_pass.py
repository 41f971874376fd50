"""The same prompts once more on shared engines: the bits of the first time, unless a cached prefix is left out.

Whoever finds a prefix in the cache computes fewer rows at once, and a product of other size may sum in another order.
Then bits may differ, on one process as on many. A wrong key or a stale buffer would show in more than the last bits.
"""

import pytest

from minivllm import SamplingParams
from tests.worlds.engines import run, tokens_of
from tests.worlds.gpu import graph_all_ranks
from tests.worlds.models import token_ids
from tests.worlds.ranks import engines_in_lockstep

SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


def passes(engine, world, requests=10):
    """Of each of three times: (tokens, their logprobs, tokens found in the cache) of every request."""
    found = []
    for turn in range(3):
        for i in range(requests):
            name = [None, *world.names][i % 5]
            engine.add_request(
                f"{turn}-{i}", token_ids(9 + 3 * i, i), SCORED, lora_request=world.request(name)
            )
        outputs = run(engine)
        found.append([scored(outputs[f"{turn}-{i}"]) for i in range(requests)])
    return found


def scored(output):
    logprobs = [next(iter(of_token.values())).logprob for of_token in output.outputs[0].logprobs]
    return tokens_of(output), logprobs, output.num_cached_tokens


OPTIONS = {"max_loras": 4, "max_num_seqs": 5, "num_kv_blocks": 120}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_without_cached_prefixes_every_pass_has_the_bits_of_the_first(world, size, dtype, monkeypatch):
    options = {**OPTIONS, "dtype": dtype, "enable_prefix_caching": False}

    for first, *others in engines_in_lockstep(
        monkeypatch, size, lambda tp: passes(world.engine(**options), world)
    ):
        assert others == [first] * len(others)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_cached_prefixes_change_no_more_than_how_sums_are_rounded(world, size, monkeypatch):
    options = {**OPTIONS, "dtype": "float32"}
    oracle = world.oracle()

    answers = engines_in_lockstep(monkeypatch, size, lambda tp: passes(world.engine(**options), world))

    for first, second, third in answers:
        assert second == third
        for i, (one, other) in enumerate(zip(first, second, strict=True)):
            assert (
                other[0] == one[0] == oracle.greedy([None, *world.names][i % 5], token_ids(9 + 3 * i, i), 8)
            )
            assert other[1] == pytest.approx(one[1], rel=0, abs=1e-5)
            assert one[2] == 0 < other[2]


@pytest.mark.nightly
def test_captured_steps_leave_nothing_for_the_next_pass(world, monkeypatch):
    graph_all_ranks(monkeypatch)
    options = {
        **OPTIONS,
        "dtype": "float32",
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
    }
    engine = world.engine(**options, tensor_parallel_size=2, threads=1, warm_up=True)

    first, *others = passes(engine, world, requests=4)

    engine.executor.shutdown()
    assert others == [first] * 2
