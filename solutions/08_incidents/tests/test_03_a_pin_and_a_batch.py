"""Hunt 8.3. Two slots, one of them pinned, two other adapters at once."""

from tests.worlds.hunts import tokens_of

pytest_plugins = "tests.worlds.hunts"


def test_a_pinned_slot_is_nobody_elses(world):
    engine = world.engine(max_loras=2)
    engine.add_lora(world.adapter(1))
    engine.pin_lora(1)
    others = [world.adapter(2), world.adapter(3)]

    outputs = world.ask_all(engine, others)

    assert list(map(tokens_of, outputs)) == list(map(world.answer, others))
