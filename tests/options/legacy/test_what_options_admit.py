"""Adapters that an option of the engine would admit are refused by its name; with it, for what else is wrong."""

import shutil

import pytest
import torch

from tests.worlds.spoiled_adapters import (
    B0,
    Q0,
    adding_tokens,
    assert_said,
    edit_config,
    edit_weights,
    problems_of,
    trained_by_peft,
    with_tensor,
    without,
)


@pytest.fixture
def folder(world, tmp_path):
    return shutil.copytree(world.path("qv"), tmp_path / "adapter")


# Options of PEFT's LoraConfig, what is done to what it saved, what is named, and the option itself.
ADMITTED = {
    "context": (
        {},
        lambda f: edit_config(f, context_length=1000),
        "--long-lora-scaling-factors 4.0",
        {"long_lora_scaling_factors": (4.0,)},
    ),
    "bias": ({"lora_bias": True}, lambda f: None, "--enable-lora-bias", {"bias_enabled": True}),
    "added tokens": ({}, adding_tokens(3), "--lora-extra-vocab-size 3", {"lora_extra_vocab_size": 3}),
}


@pytest.mark.parametrize("what", ADMITTED)
def test_an_option_that_would_admit_the_adapter_is_named_and_does(world, tmp_path, what):
    trained, change, named, option = ADMITTED[what]
    folder = trained_by_peft(tmp_path / "adapter", world.base, **trained)
    change(folder)

    assert_said(problems_of(folder, world.base), [f"pass {named}"])

    assert problems_of(folder, world.base, **option) == []


def test_a_bias_that_the_config_denies_is_told(world, tmp_path):
    folder = trained_by_peft(tmp_path / "adapter", world.base, lora_bias=True)
    edit_config(folder, lora_bias=False)

    words = [f"base_model.model.{Q0}.lora_B.bias is unsupported LoRA weight", "lora_bias=False"]
    assert_said(problems_of(folder, world.base, bias_enabled=True), words)


def test_every_option_that_is_lacking_is_named_at_once_beside_what_is_damaged(world, tmp_path):
    folder = trained_by_peft(tmp_path / "adapter", world.base, r=80, lora_bias=True)
    edit_config(folder, context_length=1000)
    adding_tokens(3)(folder)
    edit_weights(
        folder, lambda weights: {n: w * torch.nan if "layers.0" in n else w for n, w in weights.items()}
    )

    options = ["--max-lora-rank 80", "--long-lora-scaling-factors 4.0", "--enable-lora-bias"]
    tokens = ["adds 3 tokens", "--lora-extra-vocab-size 3"]
    assert_said(problems_of(folder, world.base), options, tokens, [f"{Q0}.lora_A holds NaN"])


def test_another_value_of_an_option_does_not_admit_the_adapter(world, folder):
    edit_config(folder, context_length=1000)
    with_tensor(f"base_model.model.{Q0}.lora_A.weight", torch.full((4, 48), float("nan")))(folder)

    assert_said(
        problems_of(folder, world.base, max_lora_rank=3, long_lora_scaling_factors=(2.0,)),
        [
            "rank 4 is greater than max_lora_rank 3",
            "needs rotary factor 4.0",
            "--long-lora-scaling-factors 2.0,4.0",
        ],
        [f"{Q0}.lora_A holds NaN"],
    )


def test_tokens_that_do_not_fit_are_told_beside_what_else_is_damaged(world, folder):
    adding_tokens(3, 47)(folder)
    without(B0)(folder)

    said = problems_of(folder, world.base, lora_extra_vocab_size=3)

    assert_said(said, [Q0, "not lora_B"], ["input_embeddings", "(3, 47)"])


def test_an_adapter_on_the_tokens_that_it_adds_fits(world, tmp_path):
    folder = trained_by_peft(tmp_path / "adapter", world.base, target_modules=["q_proj", "embed_tokens"])
    adding_tokens(3)(folder)
    edit_weights(
        folder, lambda ws: {n: torch.ones(4, 100) if "embedding_A" in n else w for n, w in ws.items()}
    )

    assert problems_of(folder, world.base, lora_extra_vocab_size=5) == []
