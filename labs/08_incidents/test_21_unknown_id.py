"""Hunt 8.21: An unknown id costs a good adapter its slot

`lab hunt 21` tells the symptom, `lab hint 8.21` helps, `lab hunt 21 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_21(world):
    raise Todo("lab 8.21: An unknown id costs a good adapter its slot")
