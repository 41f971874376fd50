"""Hunt 8.30: A plain adapter with an accent

`lab hunt 30` tells the symptom, `lab hint 8.30` helps, `lab hunt 30 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_30(world):
    raise Todo("lab 8.30: A plain adapter with an accent")
