"""Hunt 8.21. An id that nobody has, where the slots are full."""

import pytest

pytest_plugins = "hunt_world"


def test_an_unknown_id_costs_nobody_a_slot(world):
    engine = world.engine(max_loras=1)
    world.ask(engine, world.adapter(1))

    with pytest.raises((ValueError, KeyError, AttributeError)):
        engine.adapters.manager.activate_adapter(9)

    assert engine.debug_info()["slots"] == [1]
