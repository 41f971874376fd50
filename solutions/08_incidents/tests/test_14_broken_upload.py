"""Hunt 8.14. Memory for one adapter, a good one in it, and a bad one asked for."""

import pytest

pytest_plugins = "tests.worlds.hunts"


def test_an_adapter_that_cannot_be_read_costs_nobody_a_place(world):
    engine, good = world.engine(max_loras=1, max_cpu_loras=1), world.adapter(1)
    world.ask(engine, good)
    bad = world.adapter(2, change=lambda tensors: {name: w * float("nan") for name, w in tensors.items()})

    with pytest.raises(RuntimeError, match="NaN"):
        world.ask(engine, bad)

    assert engine.list_loras() == {1}
    assert engine.debug_info()["slots"] == [1]
