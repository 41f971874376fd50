"""Hunt 8.26: Loading an adapter never ends

`lab hunt 26` tells the symptom, `lab hint 8.26` helps, `lab hunt 26 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_26(world):
    raise Todo("lab 8.26: Loading an adapter never ends")
