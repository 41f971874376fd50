"""Hunt 8.14: A broken upload throws a good adapter out

`lab hunt 14` tells the symptom, `lab hint 8.14` helps, `lab hunt 14 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_14(world):
    raise Todo("lab 8.14: A broken upload throws a good adapter out")
