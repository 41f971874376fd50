"""Hunt 8.16: Base requests have to wait for a slot

`lab hunt 16` tells the symptom, `lab hint 8.16` helps, `lab hunt 16 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_16(world):
    raise Todo("lab 8.16: Base requests have to wait for a slot")
