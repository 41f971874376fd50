"""Hunt 8.19: One adapter too many, now and then

`lab hunt 19` tells the symptom, `lab hint 8.19` helps, `lab hunt 19 --check` grades this file.
What there is to use stands in tests/helpers/hunting.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "hunt_world"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_19(world):
    raise Todo("lab 8.19: One adapter too many, now and then")
