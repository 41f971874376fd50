"""Whether LoRA slots fit, before any is allocated. vLLM (v0.22.1) runs out of memory instead.

Brings      a sentence that names the options to lower, in the place of an error out of the allocator; and
            `minivllm.economics`, which says from a config.json what adapters take. Tests hold both to the bytes that
            are allocated (tests/sizing/test_slot_memory.py, tests/sizing/test_memory_accounting.py)
Implements  `check_slots` of `ModelRunner`
Costs       some 210 lines, and at the start the shapes of one model more, without values
"""

from functools import partial
from typing import TYPE_CHECKING

from minivllm.extension import Extension

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _add_to(parts: "Parts") -> None:
    from minivllm.sizing.slot_memory import refuse_slots_that_do_not_fit

    parts.runner["check_slots"] = partial(refuse_slots_that_do_not_fit, extensions=parts.lora)


SIZING = Extension(add_to=_add_to)
