"""Where an adapter begins in a prompt, by PEFT's own function; and which configs and adapters are refused by name."""

import random

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


@pytest.mark.parametrize(
    ("tokens", "prompt", "start"),
    [((5,), [5, 1, 5, 2], 2), ((5, 6), [5, 6, 9, 5], 0), ((5, 5), [5, 5, 5], 1), ((5, 6), [6, 5], NEVER)],
)
def test_it_is_found_on_paper(tokens, prompt, start):
    assert start_of_last(tokens, prompt) == start


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return activated_world(tmp_path_factory)


@pytest.fixture
def adapter(world, tmp_path):
    """A copy of a sound adapter's folder, to be changed."""
    import shutil

    return shutil.copytree(world.path("one"), tmp_path / "adapter")


@pytest.mark.parametrize(
    "tokens", [[], [1.0], ["7"], [True], [-1], [2**40], [[7]], 7, "7", {"7": 7}, [7] * 1025]
)
def test_tokens_that_are_no_list_of_ids_are_refused(world, adapter, tokens):
    change_json(adapter / "adapter_config.json", alora_invocation_tokens=tokens)

    with pytest.raises(ValueError, match="alora_invocation_tokens must be a list of 1 to 1024 token ids"):
        world.engine().add_request("r", [3], greedy(1), lora_request=LoRARequest("bad", 9, str(adapter)))


def test_tokens_that_the_model_does_not_have_are_refused(world, adapter):
    change_json(adapter / "adapter_config.json", alora_invocation_tokens=[7, 97])

    with pytest.raises(ValueError, match=r"has \[97\], but the model's vocabulary has 97 tokens"):
        world.engine().add_lora(LoRARequest("bad", 9, str(adapter)))


@pytest.mark.parametrize("field", [{"use_dora": True}, {"target_parameters": ["experts"]}])
def test_what_peft_does_not_combine_it_with_is_refused(world, adapter, field):
    change_json(adapter / "adapter_config.json", **field)

    with pytest.raises(ValueError, match=f"aLoRA .* is not supported with {next(iter(field))}"):
        world.engine().add_lora(LoRARequest("bad", 9, str(adapter)))


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


def test_an_adapter_with_a_longer_context_is_refused(world, adapter):
    """Rows of the base model have its positions, and those of the adapter others: nobody trains so."""
    change_json(adapter / "adapter_config.json", context_length=512)

    with pytest.raises(ValueError, match="not supported with scaling_factor"):
        world.engine(long_lora_scaling_factors=(2.0,)).add_lora(LoRARequest("bad", 9, str(adapter)))
