"""Hunt 8.31: Neither the old adapter nor the new one

`lab hunt 31` tells the symptom, `lab hint 8.31` helps, `lab hunt 31 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_31(world):
    raise Todo("lab 8.31: Neither the old adapter nor the new one")
