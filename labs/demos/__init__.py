"""The smallest visible thing that each exercise of the core path changes: `lab demo 2.2`.

`demo_2_2` in `phase_02` gives the lines that `lab demo 2.2` prints. They come from the code of the exercise, so they
are the learner's where that is in place. `python -m labs.demos 2.2` prints those of the code it runs on.
"""

import importlib
from collections.abc import Callable, Iterator


def demo_of(number: str) -> Callable[[], Iterator[str]]:
    """Gives the lines. AttributeError for an exercise without a demo: those of side tracks have none."""
    phase, _, nth = number.partition(".")
    return getattr(importlib.import_module(f"{__name__}.phase_{int(phase):02}"), f"demo_{phase}_{nth}")
