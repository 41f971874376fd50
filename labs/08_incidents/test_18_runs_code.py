"""Hunt 8.18: An adapter that runs code

`lab hunt 18` tells the symptom, `lab hint 8.18` helps, `lab hunt 18 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_18(world):
    raise Todo("lab 8.18: An adapter that runs code")
