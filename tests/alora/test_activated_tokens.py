"""Adapters that begin at their invocation tokens, mixed with all others: token by token what PEFT answers."""

import random

import pytest
from activated_world import activated_world, serve

from tests.tools.nights import by_day

VARIANTS = ["llama-llama3-rope", "mistral-one-kv-head", "qwen2-tied", "qwen3-wide-heads"]
SETTINGS = {
    "plenty of everything": {"max_loras": 6, "max_cpu_loras": 6},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "loops": {"max_loras": 3, "punica_backend": "loops"},
    "chunks of 5 tokens": {"max_loras": 4, "max_num_batched_tokens": 5, "max_num_seqs": 4},
    "few blocks": {"num_kv_blocks": 32, "max_loras": 3, "max_num_batched_tokens": 24},
    "no prefix cache": {"max_loras": 3, "enable_prefix_caching": False, "block_size": 8},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 300, "max_loras": 4},
    "short turns": {"max_lora_wait_steps": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("setting", by_day(SETTINGS))
def test_are_those_of_peft_in_a_batch_with_all_others(tmp_path_factory, setting):
    number = list(SETTINGS).index(setting)
    world = activated_world(tmp_path_factory, VARIANTS[number % 2])
    engine = world.engine(**{"num_kv_blocks": 120, **SETTINGS[setting]})

    asked = serve(world, engine, random.Random(setting), 25)

    assert world.check_answers(asked) > 90


@pytest.mark.nightly
def test_are_those_of_peft_on_two_ranks_too(tmp_path_factory):
    world = activated_world(tmp_path_factory)
    engine = world.engine(tensor_parallel_size=2, threads=1, max_loras=3, num_kv_blocks=120)

    try:
        asked = serve(world, engine, random.Random("two ranks"), 40)
    finally:
        engine.executor.shutdown()

    assert world.check_answers(asked) > 150


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_tokens_are_those_of_peft(tmp_path_factory, variant):
    """Some 24,000 tokens over the four kinds of models."""
    world, rng, tokens = activated_world(tmp_path_factory, variant), random.Random(variant), 0
    while tokens < 6000:
        options = dict(rng.choice(list(SETTINGS.values())))
        options |= {"block_size": rng.choice([1, 3, 4, 8])} if "block_size" not in options else {}
        options |= {"num_kv_blocks": 240} if "num_kv_blocks" not in options else {}
        if options["num_kv_blocks"] * options.get("block_size", 4) < 130:
            options["num_kv_blocks"] = 140
        asked = serve(world, world.engine(**options), rng, 60)
        tokens += world.check_answers(asked)
    print(f"{variant}: {tokens} tokens")
