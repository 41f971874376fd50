"""Hunt 8.15. Reads from disk, counted."""

from dataclasses import replace

pytest_plugins = "tests.worlds.hunts"


def test_a_reload_is_one_read(world):
    engine, mine = world.engine(), world.adapter(1)
    world.ask(engine, mine)

    world.ask(engine, replace(mine, load_inplace=True), max_tokens=9)

    assert engine.get_metrics()["lora"]["loads"] == 2
