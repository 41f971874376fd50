"""Adapters that all have requests all the time take turns in the slots."""

import pytest

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.lora.request import LoRARequest
from minivllm.sampling_params import SamplingParams


@pytest.mark.parametrize("bound", [1, 5, 12])
@pytest.mark.parametrize(("adapters", "slots"), [(3, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 3)])
def test_the_longest_wait_is_the_turns_of_all_who_come_before_each_as_long_as_the_bound(
    bound, adapters, slots
):
    turns_before = -(-adapters // slots) - 1  # by hand: 5 adapters, 2 slots: 2 in, 2 next, and 1 after them
    scheduler = Scheduler(
        SchedulerConfig(16, 96, bound), CacheConfig(num_blocks=200), LoRAConfig(max_loras=slots)
    )
    waited = dict.fromkeys(range(1, adapters + 1), 0)
    for number in waited:
        lora = LoRARequest(f"a{number}", number, f"adapters/{number}")
        scheduler.add_request(Request(f"a{number}", [1], SamplingParams(max_tokens=200), lora))

    longest = 0
    for _ in range(4 * turns_before * bound + 8):
        output = scheduler.schedule()
        scheduler.update_from_output(output, {s.request.request_id: [7] for s in output.scheduled})
        running = {request.adapter_id for request in output.running}
        waited = {number: 0 if number in running else steps + 1 for number, steps in waited.items()}
        longest = max(longest, *waited.values())

    assert longest == turns_before * bound
