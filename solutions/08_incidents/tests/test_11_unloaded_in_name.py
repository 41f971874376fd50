"""Hunt 8.11. Another adapter under the id of one that was unloaded."""

pytest_plugins = "tests.worlds.hunts"


def test_an_id_that_was_unloaded_serves_what_is_loaded_under_it_next(world):
    engine, mine = world.engine(enable_prefix_caching=False), world.adapter(1)
    world.ask(engine, mine)

    engine.remove_lora(1)

    assert engine.list_loras() == set()
    assert engine.debug_info()["slots"] == [None, None]
    mine = world.adapter(1, seed=5)
    assert world.ask(engine, mine) == world.answer(mine)
