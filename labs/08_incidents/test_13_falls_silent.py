"""Hunt 8.13: One adapter of many falls silent when base requests come

`lab hunt 13` tells the symptom, `lab hint 8.13` helps, `lab hunt 13 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_13(world):
    raise Todo("lab 8.13: One adapter of many falls silent when base requests come")
