"""`minivllm inspect --mixed-with`: the rank of a mix, and why there can be none."""

import json

import pytest
from mixed_world import mixed_world
from typer.testing import CliRunner

from minivllm.cli import app


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return mixed_world(tmp_path_factory)


def inspect(world, *arguments):
    return CliRunner().invoke(app, ["inspect", str(world.path("qv")), "--model", str(world.base), *arguments])


def test_it_says_the_rank_of_a_mix(world):
    others = [argument for name in ("all", "mlp") for argument in ("--mixed-with", str(world.path(name)))]

    shown, told = inspect(world, *others), json.loads(inspect(world, *others, "--json").stdout)

    assert shown.exit_code == 0 and "rank 12" in shown.stdout
    assert told["fits"] and told["rank_of_mix"] == 12 and len(told["mixed_with"]) == 2


def test_it_says_why_there_can_be_none(world):
    result = inspect(world, "--mixed-with", str(world.path("patterns")), "--max-lora-rank", "12")

    assert result.exit_code == 1 and "greater than max_lora_rank 12; pass --max-lora-rank 16" in result.stdout
