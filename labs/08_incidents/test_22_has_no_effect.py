"""Hunt 8.22: The server wraps one thing, the adapter has another

`lab hunt 22` tells the symptom, `lab hint 8.22` helps, `lab hunt 22 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_22(world):
    raise Todo("lab 8.22: The server wraps one thing, the adapter has another")
