"""Hunt 8.22. The server wraps other modules than the adapter has."""

import pytest

pytest_plugins = "tests.worlds.hunts"


@pytest.mark.parametrize("targets", [["o_proj"], ["q_proj", "v_proj"]])
def test_an_adapter_beyond_the_target_modules_is_refused(world, targets):
    engine = world.engine(target_modules=targets)

    with pytest.raises(ValueError, match="target_modules"):
        engine.add_lora(world.adapter(1))
