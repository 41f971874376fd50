"""What the code of exercises does, to look at: `lab demo 2.2`, or `lab demo 5` for a phase.

`demo_2_2` in `phase_02` gives the lines that `lab demo 2.2` prints. They come from the code of the exercise, so they
are the learner's where that is in place. `python -m labs.demos 2.2` prints those of the code it runs on. `demo_5` in
`phase_05` draws what all exercises of the phase do together.
"""

import importlib
from collections.abc import Callable, Iterator

# Phases that have a demo of their own; the engine of phase 7 has `minivllm demo`.
PICTURES = ("3", "4", "5", "6")


def demo_of(number: str) -> Callable[[], Iterator[str]]:
    """Gives the lines. AttributeError for what has no demo: exercises of side tracks, and phases but for `PICTURES`."""
    module = importlib.import_module(f"{__name__}.phase_{int(number.partition('.')[0]):02}")
    return getattr(module, f"demo_{number.replace('.', '_')}")
