"""A clock that jumps, and what policies say."""

from collections.abc import Iterator
from types import SimpleNamespace

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies.fairness import VirtualTokenCounter
from minivllm.policies.keeping import GreedyDualSizeFrequency
from minivllm.policies.prefetching import ByQueuePosition, BySession, Waiting
from minivllm.policies.routing import BoundedLoads, ConsistentHashing, least_loaded
from minivllm.policies.scheduling import first_come_first_served
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.fleet import Fleet, adapters_of_ranks
from minivllm.simulate.replica import ReplicaConfig
from minivllm.simulate.traffic import Arrival

NAMES = {0: "base", 1: "sql", 2: "json", 3: "dates", 4: "poet"}


def fleet(**more: object) -> Fleet:
    """One engine, two rows. A step takes a second; an adapter is there at once."""
    cost = CostModel({"steps": 1.0}, copy_bytes_per_s=1e12, read_bytes_per_s=1e12)
    lora = LoRAConfig(max_loras=4, max_cpu_loras=4)
    config = ReplicaConfig(SchedulerConfig(max_num_seqs=2), CacheConfig(num_blocks=400), lora, **more)
    return Fleet(config, cost, adapters_of_ranks((8,) * 4, 1.0), least_loaded)


def demo_10_1() -> Iterator[str]:
    yield "a step is a second; base requests of 2, 1 and 3 tokens come at 0, 0.5 and 60 s"
    made = fleet()
    made.serve([Arrival(0.0, 4, 2, None), Arrival(0.5, 4, 1, None), Arrival(60.0, 4, 3, None)])
    for one in made.requests:
        yield f"came at {one.arrival.time_s:4.1f}, first token at {one.first_s:4.1f}, last at {one.last_s:4.1f}"
    yield f"the clock stands at {made.now:.1f}"


def demo_10_2() -> Iterator[str]:
    policy = GreedyDualSizeFrequency({1: 5.0, 2: 4.0, 3: 3.0}.__getitem__)
    for key in (1, 2):
        policy.used(key)
    yield "sql costs 5, json 4, dates 3; sql and json are used once"
    for others, wanted in (([1, 2], 3), ([1, 3], 4)):
        victim = policy.victim(others)
        policy.left(victim)
        yield f"{NAMES[wanted]} comes, {NAMES[victim]} leaves, and the clock is {policy.clock:g}"
        if wanted == 3:
            policy.used(wanted)


def demo_10_3() -> Iterator[str]:
    yield "sql sends six requests at once, and then json two; two rows, a token a step"
    arrivals = [Arrival(0.0, 10, 2, 0)] * 6 + [Arrival(0.5, 10, 2, 1)] * 2
    for name, policy in (
        ("first come, first served", first_come_first_served),
        ("virtual token counter", VirtualTokenCounter()),
    ):
        made = fleet(scheduling=lambda ranks, policy=policy: policy)
        made.serve(arrivals)
        ends = sorted((one.last_s, NAMES[one.arrival.adapter + 1]) for one in made.requests)
        yield f"{name}: {', '.join(f'{who} {when:.0f}' for when, who in ends)}"


def demo_10_4() -> Iterator[str]:
    requests = {i: SimpleNamespace(adapter_id=i) for i in NAMES}
    queue = [requests[i] for i in (1, 0, 3, 1, 4)]
    waiting = Waiting(0.0, [], [], queue, 8)
    yield f"in the queue: {', '.join(NAMES[r.adapter_id] for r in queue)}"
    yield f"of its first four: {', '.join(NAMES[i] for i in ByQueuePosition(4)(waiting))}"
    policy = BySession(think_s=30.0)
    policy(Waiting(10.0, [], [requests[2], requests[4]], [], 8))
    for now in (20.0, 60.0):
        wanted = policy(Waiting(now, [requests[1]], [], [], 8))
        yield f"json and poet were answered at 10 s, sql comes at {now:.0f}: {', '.join(NAMES[i] for i in wanted)}"


def demo_10_5() -> Iterator[str]:
    ring = ConsistentHashing()
    before, after = ({a: ring.homes(a, n)[0] for a in range(1, 1001)} for n in (4, 5))
    moved = [a for a in before if before[a] != after[a]]
    yield f"of 1,000 adapters {len(moved)} move when a fifth engine comes, to engine {after[moved[0]]}"
    for loads in ((9, 9, 9, 9), (12, 9, 9, 9), (20, 1, 1, 1)):
        engines = [SimpleNamespace(load=load) for load in loads]
        home = next(a for a in before if before[a] == 0)
        yield f"loads {loads}: adapter {home} goes to engine {BoundedLoads()(home, engines)}"
