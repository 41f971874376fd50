"""Hunt 8.5: Experts that were trained with rsLoRA are too weak

`lab hunt 5` tells the symptom, `lab hint 8.5` helps, `lab hunt 5 --check` grades this file.
What there is to use stands in tests/worlds/hunts.py.
"""

from labs.kit.overlay import Todo

pytest_plugins = "tests.worlds.hunts"  # brings `world`: a tiny model, its adapters, engines


def test_hunt_05(world):
    raise Todo("lab 8.5: Experts that were trained with rsLoRA are too weak")
