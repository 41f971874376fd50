"""Activated adapters by a GPU's kernels, in captured steps and others: the tokens that PEFT finds likeliest."""

import random

import pytest
from activated_world import activated_world, serve

from tests.tools.device import needs_cuda

pytestmark = needs_cuda

SETTINGS = {
    "pages": {"max_loras": None},
    "slots": {"max_loras": 3},
    "chunks of 16 tokens": {"max_loras": 3, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", ["llama-llama3-rope", "qwen2-tied"])
def test_are_those_of_peft_in_a_batch_with_all_others(tmp_path_factory, variant, setting):
    world = activated_world(tmp_path_factory, variant)
    of_a_gpu = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 16,
        "warm_up": True,
        "num_kv_blocks": 200,
    }
    engine = world.engine(**{**of_a_gpu, **SETTINGS[setting]})

    asked = serve(world, engine, random.Random(setting), 60)

    assert world.check_answers(asked) > 240
