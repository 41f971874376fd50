"""Hunt 8.4: After one error an adapter is never itself again

`lab hunt 4` tells the symptom, `lab hint 8.4` helps, `lab hunt 4 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_04(world):
    raise Todo("lab 8.4: After one error an adapter is never itself again")
