"""Adapters come into their slots beside the steps of others, and every request gets its own tokens.

Without a GPU slots are written by the same kernel, through Triton's interpreter, with nothing beside it.
"""

from minivllm.core.output import ADAPTER_COPY
from minivllm.gpu import make_slot_writer
from tests.tools.device import DEVICE
from tests.worlds.engines import greedy, run, tokens_of

PROMPT = [5, 6, 7, 8, 9, 10]


def engine_with_adapters_in_memory(world, **options):
    engine = world.engine(device=DEVICE, dtype="float32", **options)
    manager = engine.adapters.manager
    manager.slot_writer = make_slot_writer(manager.wrapped, DEVICE)
    for name in world.names:
        engine.add_lora(world.request(name))
    return engine


def test_a_request_whose_adapter_is_in_memory_joins_when_it_is_in_its_slot(world):
    engine = engine_with_adapters_in_memory(world)
    absent = world.names[0]
    engine.add_request("running", PROMPT, greedy(8))
    engine.step()
    assert world.request(absent).lora_int_id not in engine.adapters.manager.lora_index_to_id

    engine.add_request("newcomer", PROMPT, greedy(4), lora_request=world.request(absent))
    engine.step()

    assert [(skip.request, skip.reason) for skip in engine.trace.records[-1].skipped] == [
        ("newcomer", ADAPTER_COPY)
    ]
    assert world.request(absent).lora_int_id in engine.adapters.manager.lora_index_to_id
    outputs = run(engine)
    assert tokens_of(outputs["newcomer"]) == world.oracle().greedy(absent, PROMPT, 4)
    assert tokens_of(outputs["running"]) == world.oracle().greedy(None, PROMPT, 8)


def test_slots_that_change_all_the_time_give_everybody_their_own_tokens(world):
    engine = engine_with_adapters_in_memory(world)
    names = [None, *world.names]
    wanted = {f"r{i}": (names[i % 5], [5 + i, 6, 7 + i % 3], 3 + i % 2) for i in range(10)}
    outputs = {}
    for request_id, (name, prompt, tokens) in wanted.items():
        engine.add_request(request_id, prompt, greedy(tokens), lora_request=world.request(name))
        outputs.update({output.request_id: output for output in engine.step() if output.finished})

    outputs.update(run(engine))

    for request_id, (name, prompt, tokens) in wanted.items():
        assert tokens_of(outputs[request_id]) == world.oracle().greedy(name, prompt, tokens), request_id
    assert any(record.skipped for record in engine.trace.records)
