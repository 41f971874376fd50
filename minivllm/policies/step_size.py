"""How many tokens a step may have in which somebody decodes. vLLM (v0.22.1) has one `max_num_batched_tokens` for all.

A step that no CUDA graph holds takes a GPU several times as long as the largest that one does, and all who decode
wait for it. A prompt in chunks of that size costs hardly more.
"""

from functools import partial

from minivllm.core.output import SchedulerOutput
from minivllm.core.scheduler import Scheduler
from minivllm.core.step_policy import StepPolicy


def budget_beside_decodes(scheduler: Scheduler, most: int, output: SchedulerOutput) -> int:
    """Tokens that are left of a step; of `most`, once the request that was admitted first decodes in it.

    Whoever decodes was admitted before those whose prompts are in the making, but for short prompts: so it is the first
    that tells.
    """
    left = StepPolicy._budget_left(scheduler, output)
    if output.scheduled and output.scheduled[0].num_new_tokens == 1:
        left = min(left, most - output.total_num_scheduled_tokens)
    return left


def install_step_size(scheduler: Scheduler, most: int) -> None:
    """Have steps in which somebody decodes end at so many tokens, unless as many may decode at a time."""
    if most > scheduler.scheduler_config.max_num_seqs:
        scheduler._budget_left = partial(budget_beside_decodes, scheduler, most)
