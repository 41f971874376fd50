"""DoRA adapters in one batch with plain ones and base: token by token what PEFT answers for each alone."""

import random

import pytest
from dora_world import dora_world, serve

from tests.tools.nights import by_day
from tests.worlds.settings import SETTINGS

VARIANTS = ["llama-llama3-rope", "llama-linear-rope-biases-tied", "qwen2-tied", "phi3-fused"]
SETTINGS = {**SETTINGS, "plenty of everything": {"max_loras": 6, "max_cpu_loras": 6}}


@pytest.mark.parametrize("setting", by_day(SETTINGS))
def test_are_those_of_peft_in_a_batch_with_all_others(tmp_path_factory, setting):
    world = dora_world(tmp_path_factory, VARIANTS[list(SETTINGS).index(setting) % 2])
    engine = world.engine(**{"num_kv_blocks": 120, **SETTINGS[setting]})

    asked = serve(world, engine, random.Random(setting), 20)

    assert world.check_answers(asked) > 80


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_tokens_are_those_of_peft(tmp_path_factory, variant):
    """Some 24,000 tokens over the four kinds of models."""
    world, rng, tokens = dora_world(tmp_path_factory, variant), random.Random(variant), 0
    while tokens < 6000:
        engine = world.engine(**{"num_kv_blocks": 120, **rng.choice(list(SETTINGS.values()))})
        tokens += world.check_answers(serve(world, engine, rng, 60))
    print(f"{variant}: {tokens} tokens")
