"""Small fleets to simulate: a step takes a second for itself and a little for every token, unless told otherwise."""

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies.routing import least_loaded
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.fleet import Fleet, adapters_of_ranks
from minivllm.simulate.replica import ReplicaConfig
from minivllm.simulate.traffic import Arrival, Lengths, make_traffic

COST = CostModel(
    {"steps": 0.01, "tokens": 0.0001, "adapters": 0.001}, copy_bytes_per_s=1e9, read_bytes_per_s=1e8
)


def config(slots=2, memory=4, max_num_seqs=8, tokens=256, blocks=400, wait=16, **more):
    return ReplicaConfig(
        SchedulerConfig(max_num_seqs, tokens, max_lora_wait_steps=wait),
        CacheConfig(num_blocks=blocks),
        LoRAConfig(max_loras=slots, max_cpu_loras=memory),
        **more,
    )


def fleet(replica=None, cost=COST, ranks=(8,) * 6, replicas=1, route=least_loaded):
    return Fleet(replica or config(), cost, adapters_of_ranks(ranks, 1e5), route, replicas)


def traffic(requests=300, rate=8.0, adapters=6, alpha=0.8, prompt=60, output=12, seed=3) -> list[Arrival]:
    lengths = Lengths(prompt, 0.7, 4, 400), Lengths(output, 0.6, 1, 60)
    return make_traffic(requests, rate, adapters, alpha, *lengths, seed)
