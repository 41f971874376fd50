"""What is around an engine knows such adapters: `minivllm inspect`, counters by adapter, the server's names."""

import json

import pytest
from activated_world import activated_world
from typer.testing import CliRunner

from minivllm.cli import app
from tests.worlds.engines import greedy, run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return activated_world(tmp_path_factory)


def test_inspect_names_the_tokens_and_says_that_it_fits(world):
    arguments = ["inspect", str(world.path("bridge")), "--model", str(world.base)]

    shown = CliRunner().invoke(app, arguments)
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)

    assert shown.exit_code == 0 and "alora_invocation_tokens (5, 6, 5)" in shown.stdout
    assert told["fits"] and told["beside"] == {"alora_invocation_tokens": [5, 6, 5]}


def test_counters_by_adapter_hold(world):
    engine = world.engine(max_loras=1)
    for number, name in enumerate(["one", "twice", "one"]):
        engine.add_request(str(number), [10, 11, 12, 5, 5, 7], greedy(2), lora_request=world.request(name))
        run(engine)

    manager = engine.adapters.manager
    activations = {
        name: manager.stats.adapter(world.names.index(name) + 1).activations for name in ("one", "twice")
    }
    assert activations == {"one": 2, "twice": 1}
    assert engine.get_metrics()["finished"] == {"length": 3}
