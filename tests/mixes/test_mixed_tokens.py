"""Mixes in one batch with their parts and base: token by token what PEFT answers to each alone."""

import random

import pytest
from mixed_world import mixed_world, serve

VARIANTS = ["llama-llama3-rope", "llama-linear-rope-biases-tied", "qwen2-tied", "phi3-fused"]
SETTINGS = {
    "plenty of everything": {"max_loras": 6, "max_cpu_loras": 12},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "loops": {"max_loras": 3, "punica_backend": "loops"},
    "chunks of 5 tokens": {"max_loras": 4, "max_num_batched_tokens": 5, "max_num_seqs": 4},
    "few blocks": {"num_kv_blocks": 32, "max_loras": 3, "max_num_batched_tokens": 24},
    "no prefix cache": {"max_loras": 3, "enable_prefix_caching": False, "block_size": 8},
    "short turns": {"max_lora_wait_steps": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_are_those_of_peft_in_a_batch_with_all_others(tmp_path_factory, setting):
    world = mixed_world(tmp_path_factory, VARIANTS[list(SETTINGS).index(setting) % 2])
    engine = world.engine(**{"num_kv_blocks": 120, **SETTINGS[setting]})

    asked = serve(world, engine, random.Random(setting), 30)

    assert world.check_answers(asked) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_tokens_are_those_of_peft(tmp_path_factory, variant):
    """Some 24,000 tokens over the four kinds of models."""
    world, rng, tokens = mixed_world(tmp_path_factory, variant), random.Random(variant), 0
    while tokens < 6000:
        engine = world.engine(**{"num_kv_blocks": 120, **rng.choice(list(SETTINGS.values()))})
        tokens += world.check_answers(serve(world, engine, rng, 60))
    print(f"{variant}: {tokens} tokens")
