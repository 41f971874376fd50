"""Hunt 8.11: Unloaded in name only

`lab hunt 11` tells the symptom, `lab hint 8.11` helps, `lab hunt 11 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_11(world):
    raise Todo("lab 8.11: Unloaded in name only")
