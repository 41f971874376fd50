"""Hunt 8.23. The logprobs of a prompt, beside those of the merged model."""

import pytest

pytest_plugins = "tests.worlds.hunts"


def test_prompt_logprobs_are_those_of_the_adapters_own_head(world):
    mine = world.adapter(1, modules=("self_attn.q_proj", "lm_head"))

    ours, right = (
        world.ask_all(engine, [lora], max_tokens=1, prompt_logprobs=1)[0].prompt_logprobs
        for engine, lora in ((world.engine(), mine), (world.merged(mine), None))
    )

    for mine_of_token, right_of_token in zip(ours[1:], right[1:], strict=True):
        assert mine_of_token.keys() == right_of_token.keys()
        for token, logprob in right_of_token.items():
            assert mine_of_token[token].logprob == pytest.approx(logprob.logprob, abs=1e-9)
