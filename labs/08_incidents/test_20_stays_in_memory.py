"""Hunt 8.20: A pin that failed, and an adapter that stays

`lab hunt 20` tells the symptom, `lab hint 8.20` helps, `lab hunt 20 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_20(world):
    raise Todo("lab 8.20: A pin that failed, and an adapter that stays")
