"""DoRA adapters by a GPU's kernels, in captured steps and others: token by token what PEFT answers for each alone."""

import random

import pytest
from dora_world import dora_world, serve

from tests.tools.device import needs_cuda

pytestmark = needs_cuda

SETTINGS = {
    "pages": {"max_loras": None},
    "slots": {"max_loras": 3},
    "triton": {"max_loras": 3, "punica_backend": "triton"},
    "not captured": {"max_loras": 3, "warm_up": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", ["llama-linear-rope-biases-tied", "qwen2-tied"])
def test_are_those_of_peft_in_a_batch_with_all_others(tmp_path_factory, variant, setting):
    world = dora_world(tmp_path_factory, variant)
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
