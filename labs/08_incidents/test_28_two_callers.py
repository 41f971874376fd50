"""Hunt 8.28: Two callers, one engine

`lab hunt 28` tells the symptom, `lab hint 8.28` helps, `lab hunt 28 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_28(world):
    raise Todo("lab 8.28: Two callers, one engine")
