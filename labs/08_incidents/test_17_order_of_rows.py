"""Hunt 8.17: The order of a batch changes its answers

`lab hunt 17` tells the symptom, `lab hint 8.17` helps, `lab hunt 17 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_17(world):
    raise Todo("lab 8.17: The order of a batch changes its answers")
