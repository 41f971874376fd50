"""Hunt 8.2: A request is answered with another tenant's adapter

`lab hunt 2` tells the symptom, `lab hint 8.2` helps, `lab hunt 2 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_02(world):
    raise Todo("lab 8.2: A request is answered with another tenant's adapter")
