"""Hunt 8.7. A reload between two times the same prompt."""

from dataclasses import replace

pytest_plugins = "tests.worlds.hunts"


def test_other_weights_compute_their_own_keys_and_values(world):
    engine, mine = world.engine(), world.adapter(7)
    old = world.ask(engine, mine)
    mine = world.adapter(7, seed=70)
    engine.add_lora(replace(mine, load_inplace=True))

    new = world.ask(engine, mine)

    assert new == world.answer(mine) != old
