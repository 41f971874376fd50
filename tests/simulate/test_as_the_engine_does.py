"""The simulated engine decides, step for step, as the real one does on the same arrivals."""

import numpy as np
import pytest

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies import scheduling
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.replica import ReplicaConfig
from minivllm.simulate.traffic import Arrival
from tests.tools.nights import by_day
from tests.worlds.engines import greedy
from tests.worlds.fleets import fleet

BLOCK, BLOCKS = 4, 60
RANKS = (4, 8, 3, 12)  # of the tiny adapters
STEP_S = CostModel({"steps": 1.0}, 0.0, 1e30, 0.0, 1e30, concurrent_copies=False)  # whatever it does


def arrivals_of(seed):
    """Bursts of requests of four adapters and base, more than two slots and three places in memory can hold."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 60, 50)).astype(float)
    adapters = [None if pick == 4 else pick for pick in rng.integers(0, 5, 50).tolist()]
    return [
        Arrival(time, int(rng.integers(1, 24)), int(rng.integers(1, 9)), adapter)
        for time, adapter in zip(times.tolist(), adapters)
    ]


def step_of(output, manager):
    return (
        [(s.request.request_id, s.num_new_tokens) for s in output.scheduled],
        output.preempted,
        sorted(output.passed_over.items()),
        list(manager.list_active_adapters().items()),
        list(manager.list_adapters()),
    )


def engines_steps(world, arrivals, policy):
    engine = world.engine(
        max_loras=2,
        max_cpu_loras=3,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=20,
        max_lora_wait_steps=5,
        block_size=BLOCK,
        num_kv_blocks=BLOCKS,
        enable_prefix_caching=False,
        scheduling_policy=policy,
    )
    steps, coming, now = [], list(enumerate(arrivals)), 0.0
    engine.listeners.append(lambda output: steps.append(step_of(output, engine.adapters.manager)))
    while coming or engine.has_unfinished_requests():
        while coming and coming[0][1].time_s <= now:
            number, arrival = coming.pop(0)
            lora = None if arrival.adapter is None else world.request(world.names[arrival.adapter])
            prompt = {"prompt_token_ids": [7] * arrival.prompt_tokens}
            engine.add_request(str(number), prompt, greedy(arrival.output_tokens), lora_request=lora)
        engine.step()
        now += 1.0
    return steps


def simulated_steps(arrivals, policy, ranks):
    config = ReplicaConfig(
        SchedulerConfig(4, 20, max_lora_wait_steps=5),
        CacheConfig(BLOCK, BLOCKS, enable_prefix_caching=False),
        LoRAConfig(max_lora_rank=16, max_loras=2, max_cpu_loras=3),
        max_model_len=64,
        concurrent_reads=False,
        scheduling=scheduling.POLICIES[policy],
    )
    made = fleet(config, STEP_S, ranks)
    (replica,) = made.replicas
    steps, launch = [], replica._launch

    def watched(output, now):
        ends = launch(output, now)
        steps.append(step_of(output, replica.manager))
        return ends

    replica._launch = watched
    made.serve(arrivals)
    return steps


@pytest.mark.parametrize("seed", by_day(range(3)))
@pytest.mark.parametrize("policy", scheduling.POLICIES)
def test_the_simulated_engine_takes_the_same_steps(world, policy, seed):
    arrivals = arrivals_of(seed)

    real = engines_steps(world, arrivals, policy)

    assert simulated_steps(arrivals, policy, RANKS) == real
    assert len({tuple(slots) for *_, slots, _ in real}) > 7 and len(real) > 60
