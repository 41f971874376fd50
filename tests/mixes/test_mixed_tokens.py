"""Mixes in one batch with their parts and base: token by token what PEFT answers to each alone."""

import random

import pytest
from mixed_world import mixed_world, serve

from tests.tools.nights import by_day, of_night
from tests.worlds.settings import SETTINGS

VARIANTS = ["llama-llama3-rope", "llama-linear-rope-biases-tied", "qwen2-tied", "phi3-fused"]


@pytest.mark.parametrize("setting", by_day(SETTINGS))
def test_are_those_of_peft_in_a_batch_with_all_others(tmp_path_factory, setting):
    world = mixed_world(tmp_path_factory, VARIANTS[list(SETTINGS).index(setting) % 2])
    engine = world.engine(**{"num_kv_blocks": 120, **SETTINGS[setting]})

    asked = serve(world, engine, random.Random(setting), 30)

    assert world.check_answers(asked) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("variant", of_night(VARIANTS, 2))
def test_many_tokens_are_those_of_peft(tmp_path_factory, variant):
    """Some 24,000 tokens over the four kinds of models."""
    world, rng, tokens = mixed_world(tmp_path_factory, variant), random.Random(variant), 0
    while tokens < 6000:
        engine = world.engine(**{"num_kv_blocks": 120, **rng.choice(list(SETTINGS.values()))})
        tokens += world.check_answers(serve(world, engine, rng, 60))
    print(f"{variant}: {tokens} tokens")
