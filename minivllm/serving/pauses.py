"""What holds up a process that only serves. Stands for `freeze_gc_heap` of vllm/utils/gc_utils.py (v0.22.1)."""

import gc
import sys

# For so many seconds a thread may keep the others from running; Python's own 0.005 are half a step of a GPU.
SWITCH_SECONDS = 0.0003
# So many objects that may hold others are made, and not freed, before the garbage collector looks at them. Python's own
# number, 700, has it look several times in a step of 128 requests.
NEW_OBJECTS = 50_000


def avoid_pauses() -> None:
    """For a process that only serves, once all is loaded. vLLM: `freeze_gc_heap`.

    The garbage collector passes over what is there, which would take it a tenth of a second each time. It looks at
    what is new seldom: a step makes thousands of objects, and nearly all of them are gone with the next.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
