"""Hunt 8.10: The third tenant waits for ever

`lab hunt 10` tells the symptom, `lab hint 8.10` helps, `lab hunt 10 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_10(world):
    raise Todo("lab 8.10: The third tenant waits for ever")
