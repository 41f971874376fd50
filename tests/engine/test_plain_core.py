"""An engine core without guards: what others may do to it is no part of a step."""

import pytest
from tiny_engine import OPTIONS, greedy, tiny_world, tokens_of

from minivllm import EngineArgs
from minivllm.core.request import Request
from minivllm.engine.core import EngineCore


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def test_serves_base_and_adapters_in_one_batch_as_the_guarded_one_does(world):
    core = EngineCore(EngineArgs(str(world.base), **OPTIONS).create_engine_config(), warm_up=False)
    guarded = world.engine()
    prompts = {None: [5, 6, 7, 8, 9], "all": [9, 8, 7], "mlp": [30, 31, 32, 33]}
    for name, prompt in prompts.items():
        lora_request = world.request(name)
        guarded.add_request(str(name), prompt, greedy(6), lora_request=lora_request)
        request = Request(str(name), prompt, greedy(6), lora_request)
        if lora_request is not None:
            request.lora_request, request.adapter_generation = core.adapters.register(
                lora_request, "the test", core.adapters.examine(lora_request)
            )
        core.scheduler.add_request(request)
        core.output_processor.add_states([core.output_processor.new_state(request, None)])

    found, expected = answers(core), answers(guarded)

    assert found == expected
    assert len(set(map(tuple, found.values()))) == 3, "the adapters make no difference"
    assert not core.scheduler.requests and not core.output_processor.states


def answers(engine):
    """Request id -> tokens, of all requests in an engine."""
    finished = {}
    while engine.output_processor.states:
        finished |= {output.request_id: tokens_of(output) for output in engine.step() if output.finished}
    return finished
