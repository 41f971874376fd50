"""Hunt 8.23: The logprobs of prompts are the wrong model's

`lab hunt 23` tells the symptom, `lab hint 8.23` helps, `lab hunt 23 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_23(world):
    raise Todo("lab 8.23: The logprobs of prompts are the wrong model's")
