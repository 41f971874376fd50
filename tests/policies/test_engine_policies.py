"""An engine goes by the policies that its options name: who is kept and who goes first changes, and no token does."""

import pytest

from minivllm.config import EVICTION_POLICIES, SCHEDULING_POLICIES
from minivllm.policies import keeping, scheduling
from tests.worlds.engines import greedy, run, tiny_world, tokens_of


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def test_the_configuration_knows_the_policies_that_there_are():
    assert tuple(keeping.POLICIES) == EVICTION_POLICIES
    assert tuple(scheduling.POLICIES) == SCHEDULING_POLICIES


@pytest.mark.parametrize(
    "option",
    [
        *({"scheduling_policy": name} for name in SCHEDULING_POLICIES),
        *({"eviction_policy": name} for name in EVICTION_POLICIES),
    ],
    ids=lambda option: next(iter(option.values())),
)
def test_tokens_do_not_depend_on_policies(world, option):
    engine = world.engine(max_loras=1, max_cpu_loras=2, max_num_seqs=2, **option)
    asked = {str(number): (name, [3 + number, 5, 7]) for number, name in enumerate(world.names * 2)}
    for request_id, (name, prompt) in asked.items():
        engine.add_request(request_id, prompt, greedy(6), lora_request=world.request(name))

    outputs = run(engine)

    for request_id, (name, prompt) in asked.items():
        assert tokens_of(outputs[request_id]) == world.oracle().greedy(name, prompt, 6)


def test_an_engine_asks_in_the_order_of_its_policy(world):
    first, other = world.names[:2]

    def joined(policy):
        order = []
        engine = world.engine(max_loras=2, max_num_seqs=2, scheduling_policy=policy)
        engine.listeners.append(lambda output: order.extend(output.cached_tokens))
        for request_id, name, tokens in (
            ("long", first, 12),
            ("base", None, 3),
            ("b", other, 2),
            ("a", first, 2),
        ):
            prompt = {"prompt_token_ids": [4, 5, tokens]}
            engine.add_request(request_id, prompt, greedy(tokens), lora_request=world.request(name))
        run(engine)
        return order

    assert joined("fcfs") == ["long", "base", "b", "a"]
    # Base needs no slot; the adapter of "a" runs when the second place is free again.
    assert joined("adapter-affine") == ["base", "long", "a", "b"]


def test_an_engine_forgets_whom_its_policy_names(world):
    used, fresh, newcomer = world.names[:3]

    def in_memory(policy):
        engine = world.engine(max_loras=1, max_cpu_loras=2, eviction_policy=policy)
        for number, name in enumerate([used, used, used, fresh, newcomer]):
            prompt = {"prompt_token_ids": [4, 5, 6 + number]}
            engine.add_request(str(number), prompt, greedy(2), lora_request=world.request(name))
            run(engine)
        return {world.names[adapter_id - 1] for adapter_id in engine.adapters.manager.list_adapters()}

    assert in_memory("lru") == {fresh, newcomer}
    assert in_memory("lfu") == {used, newcomer}
