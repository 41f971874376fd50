"""Hunt 8.2. One batch twice, with the slots dealt anew between."""

pytest_plugins = "tests.worlds.hunts"


def test_a_batch_that_comes_again_is_translated_with_the_slots_of_today(world):
    engine = world.engine(max_loras=2, enable_prefix_caching=False)
    one, two, three = (world.adapter(i) for i in (1, 2, 3))
    for lora in (one, two):
        engine.add_lora(lora)
    world.ask(engine, one, prompt=[5], max_tokens=1)
    before = engine.debug_info()["slots"]
    for lora in (three, two):  # 3 takes the slot of 2, and 2 that of 1
        engine.add_lora(lora)

    tokens = world.ask(engine, one, prompt=[5], max_tokens=1)

    assert engine.debug_info()["slots"] == before[::-1]
    assert (
        tokens == world.answer(one, prompt=[5], max_tokens=1) != world.answer(two, prompt=[5], max_tokens=1)
    )
