"""Hunt 8.6: More copies than adapters

`lab hunt 6` tells the symptom, `lab hint 8.6` helps, `lab hunt 6 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_06(world):
    raise Todo("lab 8.6: More copies than adapters")
