"""Hunt 8.8. Names that no module of the model has, from their first part to their last."""

import pytest

pytest_plugins = "tests.worlds.hunts"


@pytest.mark.parametrize(
    "old, new",
    [("q_proj", "query"), ("layers.1.", "layers.7."), ("model.layers.", "language_model.layers.")],
)
def test_an_adapter_for_another_model_is_refused_by_name(world, old, new):
    engine = world.engine()
    mine = world.adapter(7, change=lambda tensors: {k.replace(old, new): v for k, v in tensors.items()})

    with pytest.raises(ValueError, match=new):
        engine.add_lora(mine)
