"""Hunt 8.20. A pin that fails, and then a full memory."""

import pytest

pytest_plugins = "tests.worlds.hunts"


def test_a_pin_that_failed_holds_nobody_in_memory(world):
    engine = world.engine(max_loras=1, max_cpu_loras=2)
    manager = engine.adapters.manager
    for adapter_id in (1, 2):
        engine.add_lora(world.adapter(adapter_id))
    manager.pin_adapter(1)
    with pytest.raises(RuntimeError):
        manager.pin_adapter(2)

    engine.add_lora(world.adapter(3))

    assert engine.list_loras() == {1, 3}
    assert manager.pinned_adapters == {1}
