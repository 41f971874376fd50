"""Hunt 8.15: The disk is read at every step

`lab hunt 15` tells the symptom, `lab hint 8.15` helps, `lab hunt 15 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_15(world):
    raise Todo("lab 8.15: The disk is read at every step")
