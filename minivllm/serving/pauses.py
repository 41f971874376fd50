"""What holds up a process that only serves. Stands for `freeze_gc_heap` of vllm/utils/gc_utils.py (v0.22.1)."""

import gc
import sys

# For so many seconds a thread may keep the others from running; Python's own 0.005 are half a step of a GPU.
SWITCH_SECONDS = 0.0003


def avoid_pauses() -> None:
    """For a process that only serves, once all is loaded. vLLM: `freeze_gc_heap`.

    The garbage collector passes over what is there, which would take it a tenth of a second each time.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
