"""Where an adapter begins in a prompt, by PEFT's own function; and which configs and adapters are refused by name."""

import random
import shutil

import pytest
from activated_world import activated_world

from minivllm import LoRARequest
from minivllm.alora.prompts import NEVER, start_of_last
from tests.worlds.adapters import change_json, save_adapter
from tests.worlds.engines import greedy


def starts_in_peft(tokens, prompt):
    import torch
    from peft import LoraConfig
    from peft.tuners.lora.variants import calculate_alora_offsets

    config = {"a": LoraConfig(alora_invocation_tokens=tokens, task_type="CAUSAL_LM")}
    (offset,) = calculate_alora_offsets(config, "a", torch.tensor([prompt]))
    return NEVER if offset is None else len(prompt) - offset


def test_it_is_where_peft_finds_the_tokens_last():
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 4))]
        prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 12))]

        assert start_of_last(tuple(tokens), prompt) == starts_in_peft(tokens, prompt), (tokens, prompt)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return activated_world(tmp_path_factory)


NO_IDS = ([], [1.0], ["7"], [True], [-1], [2**40], [[7]], 7, "7", {"7": 7}, [7] * 1025)
REFUSED = [
    *(
        ({"alora_invocation_tokens": tokens}, "alora_invocation_tokens must be a list of 1 to 1024 token ids")
        for tokens in NO_IDS
    ),
    ({"alora_invocation_tokens": [7, 97]}, r"has \[97\], but the model's vocabulary has 97 tokens"),
    # What PEFT does not combine it with.
    ({"use_dora": True}, "aLoRA .* is not supported with use_dora"),
    ({"target_parameters": ["experts"]}, "aLoRA .* is not supported with target_parameters"),
    # Rows of the base model have its positions, and those of the adapter others: nobody trains so.
    ({"context_length": 512}, "not supported with scaling_factor"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_adapter_that_makes_no_sense_is_refused_by_name(world, tmp_path, changes, message):
    folder = shutil.copytree(world.path("one"), tmp_path / "adapter")
    change_json(folder / "adapter_config.json", **changes)
    engine = world.engine(long_lora_scaling_factors=(2.0,))

    with pytest.raises(ValueError, match=message):
        engine.add_request("r", [3], greedy(1), lora_request=LoRARequest("bad", 9, str(folder)))


def test_peft_does_not_adapt_embeddings_so_and_neither_does_the_engine(world, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}
    with pytest.raises(ValueError, match="unsupported variant"):
        get_peft_model(
            AutoModelForCausalLM.from_pretrained(world.base),
            LoraConfig(alora_invocation_tokens=[7], task_type="CAUSAL_LM", **config),
        )
    folder = save_adapter(tmp_path / "embeds", world.base, 0, **config)
    change_json(folder / "adapter_config.json", alora_invocation_tokens=[7])

    with pytest.raises(
        ValueError, match=r"linears only, and model\.embed_tokens is a VocabParallelEmbedding"
    ):
        world.engine().add_lora(LoRARequest("bad", 9, str(folder)))
