"""An engine core by itself, of plain parts: calls of others are no part of a step."""

import time

from minivllm import EngineArgs
from minivllm.core.request import Request
from minivllm.engine.parts import plain_core
from tests.worlds.engines import OPTIONS, greedy, tokens_of


def test_serves_base_and_adapters_in_one_batch_as_a_whole_engine_does(world):
    config = EngineArgs(str(world.base), **OPTIONS).create_engine_config()
    core, engine = plain_core(config, None, False, time.monotonic), world.engine()
    prompts = {None: [5, 6, 7, 8, 9], "all": [9, 8, 7], "mlp": [30, 31, 32, 33]}
    for name, prompt in prompts.items():
        lora_request = world.request(name)
        engine.add_request(str(name), prompt, greedy(6), lora_request=lora_request)
        core.add_request(core.check_request(Request(str(name), prompt, greedy(6), lora_request)))

    found, expected = answers(core), answers(engine)

    assert found == expected
    assert len(set(map(tuple, found.values()))) == 3, "the adapters make no difference"
    assert not core.scheduler.requests and not core.output_processor.states


def answers(engine):
    """Request id -> tokens, of all requests in an engine."""
    finished = {}
    while engine.output_processor.states:
        finished |= {output.request_id: tokens_of(output) for output in engine.step() if output.finished}
    return finished
