"""Hunt 8.12: 200 OK for a path with nothing in it

`lab hunt 12` tells the symptom, `lab hint 8.12` helps, `lab hunt 12 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_12(world):
    raise Todo("lab 8.12: 200 OK for a path with nothing in it")
