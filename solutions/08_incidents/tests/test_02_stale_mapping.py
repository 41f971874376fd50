"""Hunt 8.2. One batch twice, with the slots dealt anew between."""

pytest_plugins = "hunt_world"


def test_a_batch_that_comes_again_is_translated_with_the_slots_of_today(world):
    engine = world.engine(max_loras=2, enable_prefix_caching=False)
    one, two = world.adapter(1), world.adapter(2)
    for lora in (one, two):
        engine.add_lora(lora)
    world.ask(engine, one, prompt=[5], max_tokens=1)
    for adapter_id in (1, 2):
        engine.remove_lora(adapter_id)
    for lora in (two, one):
        engine.add_lora(lora)

    tokens = world.ask(engine, one, prompt=[5], max_tokens=1)

    assert engine.debug_info()["slots"] == [2, 1]
    assert (
        tokens == world.answer(one, prompt=[5], max_tokens=1) != world.answer(two, prompt=[5], max_tokens=1)
    )
