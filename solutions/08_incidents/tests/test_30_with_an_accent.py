"""Hunt 8.30: a plain adapter with an accent."""

import torch

pytest_plugins = "tests.worlds.hunts"


def with_magnitudes(tensors):
    ends = [name for name in tensors if name.endswith(".lora_B.weight")]
    names = {name.replace("lora_B.weight", "lora_magnitude_vector"): len(tensors[name]) for name in ends}
    return tensors | {name: torch.full((height,), 4.0) for name, height in names.items()}


def test_a_plain_adapter_answers_as_itself_in_a_slot_that_had_scales(world):
    engine = world.engine(enable_dora=True, max_loras=2)
    for number in (1, 2):  # the second one stays in its slot, so that scales are looked at
        world.ask(engine, world.adapter(number, use_dora=True, change=with_magnitudes))
    plain = world.adapter(3)

    tokens = world.ask(engine, plain)

    assert tokens == world.answer(plain)
