"""Hunt 8.6. Copies into slots, counted."""

from tests.worlds.hunts import tokens_of

pytest_plugins = "tests.worlds.hunts"


def test_a_step_copies_only_what_was_in_no_slot(world):
    engine = world.engine(max_loras=3, max_cpu_loras=6)
    loras = {i: world.adapter(i) for i in range(1, 6)}
    for adapter_id in (5, 4, 3):  # 5 was used longest ago
        world.ask(engine, loras[adapter_id])
    before = engine.get_metrics()["lora"]["activations"]

    outputs = world.ask_all(engine, [loras[i] for i in (1, 2, 5)])

    assert engine.get_metrics()["lora"]["activations"] - before == 2
    assert list(map(tokens_of, outputs)) == [world.answer(loras[i]) for i in (1, 2, 5)]
