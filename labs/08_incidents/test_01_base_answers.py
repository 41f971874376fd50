"""Hunt 8.1: The base model answers as one of its tenants

`lab hunt 1` tells the symptom, `lab hint 8.1` helps, `lab hunt 1 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_01(world):
    raise Todo("lab 8.1: The base model answers as one of its tenants")
