"""Hunt 8.19: One adapter too many, now and then

`lab hunt 19` tells the symptom, `lab hint 8.19` helps, `lab hunt 19 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_19(world):
    raise Todo("lab 8.19: One adapter too many, now and then")
