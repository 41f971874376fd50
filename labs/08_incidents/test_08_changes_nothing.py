"""Hunt 8.8: An adapter that changes nothing

`lab hunt 8` tells the symptom, `lab hint 8.8` helps, `lab hunt 8 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_08(world):
    raise Todo("lab 8.8: An adapter that changes nothing")
