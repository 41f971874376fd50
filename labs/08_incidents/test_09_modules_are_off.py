"""Hunt 8.9: Modules with a rank of their own are off

`lab hunt 9` tells the symptom, `lab hint 8.9` helps, `lab hunt 9 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_09(world):
    raise Todo("lab 8.9: Modules with a rank of their own are off")
