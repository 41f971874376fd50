"""Hunt 8.25: One request stops the whole server

`lab hunt 25` tells the symptom, `lab hint 8.25` helps, `lab hunt 25 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_25(world):
    raise Todo("lab 8.25: One request stops the whole server")
