"""Updates at random steps, in a batch with all else: logprobs are those of transformers + PEFT for each version."""

import random

import pytest
from learning_world import learning_world, serve

from minivllm.versions.weights import token_versions
from tests.tools.nights import by_day
from tests.worlds import settings
from tests.worlds.engines import tokens_of

VARIANTS = ["llama-llama3-rope", "llama-linear-rope-biases-tied", "qwen2-tied", "qwen3-wide-heads"]
# With memory for versions beside each other.
SETTINGS = {name: {"max_cpu_loras": 6, **options} for name, options in settings.SETTINGS.items()}
SETTINGS["one slot"] = {"max_loras": 1, "max_cpu_loras": 3}


def check_run(world, setting, rng, count):
    engine = world.engine(**{"num_kv_blocks": 120, **SETTINGS[setting]})
    asked, folder_of = serve(world, engine, rng, count)
    tokens = world.check(asked, folder_of)
    assert len(engine.adapters.adapters) <= 3, "old versions are forgotten with their last requests"
    assert engine.scheduler.kv_cache.block_pool.get_num_free_blocks() == engine.runner.num_blocks - 1
    return tokens, asked, folder_of


@pytest.mark.parametrize("setting", by_day(SETTINGS))
def test_logprobs_are_those_of_each_version(tmp_path_factory, setting):
    world = learning_world(tmp_path_factory, VARIANTS[list(SETTINGS).index(setting) % 2])

    tokens, asked, folder_of = check_run(world, setting, random.Random(setting), 40)

    assert tokens > 150 and len(folder_of) > 3
    versions = {
        tuple(dict.fromkeys(token_versions(one.output.lora_request, len(tokens_of(one.output)))))
        for one in asked
        if one.whose == "policy"
    }
    assert len(versions) > 2, "requests of several versions"


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_logprobs_are_those_of_each_version(tmp_path_factory, variant):
    """Some 20,000 tokens over the four kinds of models."""
    world, rng, tokens = learning_world(tmp_path_factory, variant), random.Random(variant), 0
    while tokens < 5000:
        tokens += check_run(world, rng.choice(list(SETTINGS)), rng, 60)[0]
    print(f"{variant}: {tokens} tokens")
