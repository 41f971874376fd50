"""Hunt 8.3: A pin, and a batch that cannot be placed

`lab hunt 3` tells the symptom, `lab hint 8.3` helps, `lab hunt 3 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_03(world):
    raise Todo("lab 8.3: A pin, and a batch that cannot be placed")
