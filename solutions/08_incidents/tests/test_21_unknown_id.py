"""Hunt 8.21. An id that nobody has, where the slots are full."""

import pytest

pytest_plugins = "tests.worlds.hunts"


def test_an_unknown_id_costs_nobody_a_slot(world):
    engine = world.engine(max_loras=2)
    for adapter_id in (1, 2):  # no step needs 1 any more, so it may be evicted
        world.ask(engine, world.adapter(adapter_id))
    before = engine.debug_info()["slots"]

    with pytest.raises((ValueError, KeyError, AttributeError)):
        engine.adapters.manager.activate_adapter(9)

    assert engine.debug_info()["slots"] == before
