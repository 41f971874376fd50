"""Hunt 8.7: New weights, old answers

`lab hunt 7` tells the symptom, `lab hint 8.7` helps, `lab hunt 7 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_07(world):
    raise Todo("lab 8.7: New weights, old answers")
