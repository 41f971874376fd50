"""Whether slots fit."""

from functools import partial

from minivllm.engine.extension import Extension, Parts


def _add_to(parts: Parts) -> None:
    from minivllm.sizing.slot_memory import refuse_slots_that_do_not_fit

    parts.runner["check_slots"] = partial(refuse_slots_that_do_not_fit, extensions=parts.lora)


SIZING = Extension(add_to=_add_to)
