"""Hunt 8.16. As many adapters as slots, and base."""

from tests.worlds.hunts import PROMPT, greedy

pytest_plugins = "tests.worlds.hunts"


def test_base_joins_beside_as_many_adapters_as_slots(world):
    engine = world.engine(max_loras=2)
    for lora in (world.adapter(1), world.adapter(2), None):
        engine.add_request(str(lora and lora.lora_int_id), PROMPT, greedy(4), lora_request=lora)

    outputs = engine.step()

    assert {output.request_id for output in outputs} == {"1", "2", "None"}
