"""`minivllm inspect` prints what an adapter is and every reason against it, as text and as JSON; exit status 1."""

import json
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from minivllm.cli import app
from tests.worlds.spoiled_adapters import (
    A0,
    B0,
    CONFIG,
    PICKLE,
    Q0,
    WEIGHTS,
    Payload,
    as_raw_pickle,
    assert_said,
    edit_config,
    without,
)


@pytest.fixture
def folder(world, tmp_path):
    return shutil.copytree(world.path("qv"), tmp_path / "adapter")


def inspect(world, folder, *options):
    """What the command prints as text and as JSON; nothing goes to stderr, no warning and no log."""
    results = []
    for form in ([], ["--json"]):
        with warnings.catch_warnings(action="error"):
            result = CliRunner().invoke(
                app, ["inspect", str(folder), "--model", str(world.base), *options, *form]
            )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.stderr == ""
        results.append(result)
    text, report = results[0].stdout, json.loads(results[1].stdout)
    assert results[0].exit_code == results[1].exit_code == (0 if report["fits"] else 1)
    assert report["path"] == str(folder) and report["model"] == str(world.base)
    return text, report


@pytest.mark.parametrize("name", ["qv", "all", "mlp", "patterns"])
def test_good_adapters_fit(world, name):
    text, report = inspect(world, world.path(name))

    assert report["fits"] and report["reasons"] == []
    assert text.splitlines()[-1] == f"fits {world.base}"
    tensors = load_file(world.path(name) / WEIGHTS)
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("spoil", "words", "is_described"),
    [
        (without(B0), [Q0, "has lora_A but not lora_B"], True),
        (lambda f: edit_config(f, peft_type="IA3"), [CONFIG, "peft_type 'IA3'"], False),
        (shutil.rmtree, ["adapter' does not exist"], False),
    ],
    ids=["a tensor", "the config", "the folder"],
)
def test_each_reason_has_its_line_below_what_is_known_of_the_adapter(
    world, folder, spoil, words, is_described
):
    spoil(folder)

    text, report = inspect(world, folder)

    assert not report["fits"]
    assert_said(report["reasons"], words)
    first, *rest = text.splitlines()
    verdict = [f"does not fit {world.base}:", *(f"- {reason}" for reason in report["reasons"])]
    assert first == str(folder)
    assert rest[-len(verdict) :] == verdict
    description = rest[: -len(verdict)]
    assert bool(description) == ("targets" in report) == is_described
    assert not description or re.match(r"(rs)?LoRA \(alpha", description[0])


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"context_length": 1000}, "--long-lora-scaling-factors 4.0"),
        ({"context_length": 1000}, "--long-lora-scaling-factors 2.0,4.0"),
        ({"lora_bias": True}, "--enable-lora-bias"),
        ({}, "--max-lora-rank 4"),
        ({}, "--lora-extra-vocab-size 3"),
    ],
    ids=["a factor", "factors", "bias", "rank", "tokens"],
)
def test_options_are_those_of_the_engine(world, folder, changes, option):
    edit_config(folder, **changes)

    assert inspect(world, folder, *option.split())[1]["reasons"] == []


def test_a_pickle_fits_unless_an_option_refuses_it(world, folder):
    torch.save(load_file(folder / WEIGHTS), folder / PICKLE)
    (folder / WEIGHTS).unlink()

    assert inspect(world, folder)[1]["fits"]
    [reason] = inspect(world, folder, "--refuse-pickles")[1]["reasons"]
    assert PICKLE in reason and "save it as safetensors" in reason


def test_an_id_that_the_hub_does_not_have_is_named_with_the_reason(world, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    [reason] = inspect(world, "nobody/nothing")[1]["reasons"]

    assert "adapter folder 'nobody/nothing' does not exist" in reason
    assert "the Hugging Face hub did not give it" in reason and "HF_HUB_OFFLINE" in reason


def test_of_a_pickle_the_verdict_is_printed_and_nothing_else(world, folder, tmp_path, monkeypatch):
    """Of protocol 4, of which torch would have something to say besides."""
    monkeypatch.chdir(tmp_path)
    as_raw_pickle({A0: Payload()})(folder)

    text, report = inspect(world, folder)

    assert not report["fits"] and len(text.splitlines()) == 3
    assert not (tmp_path / "ran").exists()
