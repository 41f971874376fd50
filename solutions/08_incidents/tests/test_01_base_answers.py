"""Hunt 8.1. Base rows beside adapters in every slot, and alone."""

from tests.worlds.hunts import tokens_of

pytest_plugins = "tests.worlds.hunts"


def test_base_answers_as_base_whoever_is_beside_it(world):
    engine = world.engine(max_loras=2)
    one, two = world.adapter(1), world.adapter(2)

    outputs = world.ask_all(engine, [one, None, two])

    assert tokens_of(outputs[1]) == world.answer(None)
    assert world.ask(engine, None) == world.answer(None)
