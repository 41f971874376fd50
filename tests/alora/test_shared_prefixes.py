"""Whose blocks an adapter finds that begins late, and who finds its own: on paper, in blocks of 4 tokens."""

import pytest
import torch
from activated_world import activated_world

from minivllm import SamplingParams
from tests.worlds.arrivals import Asked
from tests.worlds.engines import greedy, run, tokens_of

TEXT = [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]  # three blocks without a token of an invocation
ONE, TWICE, LONG = [7], [5, 5], [6, 5, 5, 7, 6]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return activated_world(tmp_path_factory)


def cached(world, engine, name, prompt):
    engine.add_request("r", prompt, greedy(3), lora_request=world.request(name))
    request = engine.scheduler.requests["r"]
    output = run(engine)["r"]
    world.check_answers([Asked(name, prompt, tokens_of(output))])
    return request.num_cached_tokens


def test_a_conversation_of_the_base_model_is_found_by_an_adapter_that_was_never_loaded(world):
    engine = world.engine()
    cached(world, engine, None, [*TEXT, 40])

    prompt = [*TEXT, *ONE, 41, 42, 43, 44]
    assert cached(world, engine, "one", prompt) == 12
    assert cached(world, engine, "one", prompt) == 16, (
        "its own block behind what was found before it was loaded"
    )


def test_the_base_model_and_other_adapters_find_what_one_computed_before_it_began(world):
    engine = world.engine(max_loras=4)
    cached(world, engine, "one", [*TEXT, *ONE, 41])

    assert cached(world, engine, None, [*TEXT, *ONE, 42]) == 12
    assert cached(world, engine, "twice", [*TEXT, *TWICE, 42]) == 12
    assert cached(world, engine, "qv", [*TEXT, *ONE, 42]) == 0, "a plain adapter computes all of its prompt"


def test_the_block_in_which_it_begins_and_those_behind_are_its_own(world):
    engine = world.engine(max_loras=4)
    prompt = [*TEXT[:10], *ONE, 50, 51, 52, 53, 54, 55]  # it begins at token 10, in the third block
    cached(world, engine, "one", prompt)

    assert cached(world, engine, "one", [*prompt[:-1], 60]) == 16, "its own"
    assert cached(world, engine, None, [*prompt[:-1], 61]) == 8, "no block past the border"
    assert cached(world, engine, "one", [*prompt[:-1], 62]) == 16


def test_a_block_of_the_same_tokens_in_which_it_begins_elsewhere_is_another(world):
    """`5 5` begins at the last token of the second block, or in the middle of it: the next token decides."""
    engine = world.engine(max_loras=4)
    first = [*TEXT[:4], 5, 5, 9, 5, 8, 8]
    second = [*TEXT[:4], 5, 5, 9, 5, 5, 8]
    cached(world, engine, "twice", first)

    assert cached(world, engine, "twice", second) == 4
    assert cached(world, engine, "twice", [*first, 8]) == 8


def test_a_prompt_without_its_tokens_is_the_base_models_to_the_end(world):
    engine = world.engine()
    prompt = [*TEXT, 40]

    assert cached(world, engine, "one", prompt) == 0
    assert cached(world, engine, None, [*prompt, 44]) == 12
    engine.add_request("base", prompt, greedy(8))
    engine.add_request("one", prompt, greedy(8), lora_request=world.request("one"))
    outputs = run(engine)
    assert tokens_of(outputs["one"]) == tokens_of(outputs["base"])


def test_after_a_reload_its_own_blocks_are_lost_and_the_base_models_are_not(world):
    engine = world.engine()
    prompt = [*TEXT, 7, 8, 9, 10, 11]
    cached(world, engine, "one", prompt)
    engine.add_lora(world.request("one", load_inplace=True))

    assert cached(world, engine, "one", prompt) == 12
    assert cached(world, engine, "one", prompt) == 16


def test_answers_of_one_prompt_share_it(world):
    engine = world.engine()
    sampling = SamplingParams(
        n=3, temperature=0.001, max_tokens=4, ignore_eos=True
    )  # all but the likeliest token
    engine.add_request("n", [*TEXT, *ONE, 41], sampling, lora_request=world.request("one"))

    output = run(engine)["n"]

    answers = {tuple(completion.token_ids) for completion in output.outputs}
    assert len(answers) == 1
    world.check_answers([Asked("one", [*TEXT, *ONE, 41], list(answers.pop()))])
    assert engine.scheduler.kv_cache.prefix_cache_stats.hits == 24


@pytest.mark.parametrize("max_num_batched_tokens", [3, 200])
def test_logprobs_of_a_prompt_are_the_base_models_before_it_begins(world, max_num_batched_tokens):
    """The adapter is on the head, too: a row of logits that is the wrong one's shows."""
    prompt = [*TEXT[:9], *LONG, 41, 42]
    engine = world.engine(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=2)
    engine.add_request("base", TEXT, greedy(2))
    engine.add_request("r", prompt, greedy(1, prompt_logprobs=0), lora_request=world.request("long"))

    output = run(engine)["r"]

    logits = world.logits([Asked("long", prompt, tokens_of(output))])[0].log_softmax(-1)
    expected = [logits[i, token].item() for i, token in enumerate(prompt[1:])]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])]
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-6)
