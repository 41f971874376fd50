"""Hunt 8.29: The base model has read the judge's mind

`lab hunt 29` tells the symptom, `lab hint 8.29` helps, `lab hunt 29 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_29(world):
    raise Todo("lab 8.29: The base model has read the judge's mind")
