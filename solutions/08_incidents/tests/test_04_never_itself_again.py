"""Hunt 8.4. A copy fails in one of the layers; the next request is asked."""

import pytest

pytest_plugins = "tests.worlds.hunts"


def test_after_a_copy_that_failed_the_adapter_is_copied_again(world, monkeypatch):
    engine, mine = world.engine(), world.adapter(1)
    layer = engine.adapters.manager.modules["model.layers.1.mlp.down_proj"]

    def fail(slot, weights):
        raise MemoryError("no room for it")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "write", fail)
        with pytest.raises((RuntimeError, MemoryError)):
            world.ask(engine, mine)

    assert world.ask(engine, mine) == world.answer(mine)
