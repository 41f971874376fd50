"""`lab league`: policies on eight traffics, beside what no policy can beat. Contract and scores: docs/league.md.

Four engines of the simulator serve each traffic. What counts is the mean time to first token: 1 is the engine's own
policies, 0 is the bound. Six traffics are public. Two are drawn from a secret of a host's, so nobody tunes on them.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

from labs.kit.judges import Refused
from labs.kit.league_bounds import least_ttft
from labs.kit.regions import LabError
from minivllm.commands.simulate import arrivals_of, load_cost
from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.policies import keeping, prefetching, routing, scheduling
from minivllm.policies.replay import belady_hits, hits
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.fleet import Fleet, adapters_of_ranks
from minivllm.simulate.replica_config import ReplicaConfig
from minivllm.simulate.report import report
from minivllm.simulate.traffic import ADAPTERS, TIMES, TRACES, Arrival

ENGINES, SLOTS, MEMORY = 4, 8, 24  # of each engine: adapters in slots and in memory
ROWS, TOKENS = 64, 2048  # of a step
RANKS = (8, 16, 32, 64)  # of adapters, in turn
DISK = 0.8e9  # bytes a second, of each engine's
LEAST_SECRET = 16  # characters

Maker = Callable[..., Any]
# What each kind of policy is made from, and the engine's own answer.
OWN: dict[str, Maker] = {
    "admission": scheduling.POLICIES["fcfs"],  # from an adapter's rank, by id
    "eviction": keeping.POLICIES["lru"],  # from the seconds of a reload, by id; one for each tier
    "prefetch": lambda: lambda waiting: (),  # from nothing
    "routing": routing.POLICIES["least-loaded"],  # from a seed
}


USUAL = {"trace": "azure-2023-conv", "times": "poisson", "adapter_mix": "zipf", "alpha": 1.0, "turns": 1.0}
USUAL |= {"requests": 500, "rate": 14.0, "adapters": 200, "seed": 709}


@dataclass(frozen=True)
class Traffic:
    """options: of `minivllm simulate`, where they are not `USUAL`; is_apart: known to the host alone"""

    name: str
    options: dict[str, Any]
    is_apart: bool = False

    @property
    def given(self) -> dict[str, Any]:
        return USUAL | self.options

    def arrivals(self) -> list[Arrival]:
        return arrivals_of(self.given)


OPEN_TRAFFICS = (
    # The first three are what a router meets that knows only where adapters are (llm-d-router, issue 709).
    Traffic("hotspot", {"adapter_mix": "hotspot", "rate": 28.0}),
    Traffic("thrash", {"adapter_mix": "thrash", "times": "trace", "adapters": 120}),
    Traffic("long tail", {"adapter_mix": "long-tail", "adapters": 300}),
    Traffic("bursts", {"times": "bursts"}),
    Traffic("day and night", {"times": "diurnal", "adapter_mix": "tenants"}),
    Traffic("sessions", {"turns": 3.0, "rate": 24.0, "trace": "azure-2023-code"}),
)


def apart(secret: str) -> list[Traffic]:
    """Two traffics that follow from a secret. LabError for one that can be guessed."""
    if len(secret) < LEAST_SECRET:
        raise LabError(f"a secret of {len(secret)} characters can be guessed; take {LEAST_SECRET} or more")
    rng = Random(hashlib.sha256(f"league {secret}".encode()).hexdigest())
    return [
        Traffic(
            f"apart {n}",
            {
                "adapter_mix": mix,
                "times": rng.choice(["trace", *sorted(TIMES)]),
                "trace": rng.choice(TRACES),
                "adapters": rng.randrange(100, 301, 10),
                "alpha": round(rng.uniform(0.7, 1.2), 2),
                "turns": rng.choice((1.0, 1.0, 3.0)),
                "rate": round(rng.uniform(10.0, 16.0), 1),
                "seed": rng.getrandbits(32),
            },
            is_apart=True,
        )
        for n, mix in enumerate(rng.sample(sorted(ADAPTERS), 2), 1)
    ]


# One traffic, one entrant.


class Seen(NamedTuple):
    """What a router may know of an engine, as `minivllm.policies.routing.Engine`."""

    load: int
    has: Callable[[int], bool]


class CheckedEviction:
    """A `KeepPolicy` whose victims are candidates."""

    def __init__(self, policy: keeping.KeepPolicy) -> None:
        self.used, self.left, self._victim = policy.used, policy.left, policy.victim

    def victim(self, candidates: Sequence[int]) -> int:
        victim = self._victim(tuple(candidates))
        if type(victim) is not int or victim not in candidates:
            raise Refused(f"victim() gave {victim!r:.80}, which is none of the candidates")
        return victim


def checked(makers: dict[str, Maker], adapters: int) -> dict[str, Maker]:
    """Makers of the same policies, with the engine's own for the rest. Refused is raised for what is no answer."""
    made = OWN | makers

    def admission(ranks: Callable[[int], int]) -> scheduling.SchedulingPolicy:
        policy = made["admission"](ranks)

        def asked(scheduler: Any, output: Any) -> Iterator[Request]:
            for request in policy(scheduler, output):
                if not isinstance(request, Request) or request not in scheduler.waiting:
                    raise Refused(f"admission gave {request!r:.80}, which is no request that waits")
                yield request

        return asked

    def prefetch() -> prefetching.PrefetchPolicy:
        policy = made["prefetch"]()

        def asked(waiting: prefetching.Waiting) -> Iterator[int]:
            for adapter_id in policy(waiting):
                if type(adapter_id) is not int or not 1 <= adapter_id <= adapters:
                    raise Refused(f"prefetch gave {adapter_id!r:.80}, and adapters are 1 to {adapters}")
                yield adapter_id

        return asked

    def route(seed: int) -> routing.RoutingPolicy:
        policy = made["routing"](seed)

        def asked(adapter_id: int, engines: Sequence[routing.Engine]) -> int:
            number = policy(adapter_id, tuple(Seen(engine.load, engine.has) for engine in engines))
            if type(number) is not int or not 0 <= number < len(engines):
                raise Refused(f"routing gave {number!r:.80}, and engines are 0 to {len(engines) - 1}")
            return number

        return asked

    def eviction(cost: Callable[[int], float]) -> keeping.KeepPolicy:
        return CheckedEviction(made["eviction"](cost))

    return {"admission": admission, "eviction": eviction, "prefetch": prefetch, "routing": route}


@cache
def cost_model() -> CostModel:
    return replace(load_cost("h100-llama-8b"), read_bytes_per_s=DISK)


def fleet_of(makers: dict[str, Maker], adapters: int, seed: int, cost: CostModel) -> Fleet:
    """Engines with nothing in them yet, behind a router.   makers: of `checked`"""
    config = ReplicaConfig(
        SchedulerConfig(ROWS, TOKENS),
        CacheConfig(num_blocks=8192),
        LoRAConfig(max(RANKS), SLOTS, MEMORY).on_device("cuda"),
        keeping=makers["eviction"],
        scheduling=makers["admission"],
        prefetching=makers["prefetch"],
    )
    sizes = adapters_of_ranks([RANKS[n % len(RANKS)] for n in range(adapters)], cost.bytes_per_rank)
    return Fleet(config, cost, sizes, makers["routing"](seed), ENGINES)


def play(makers: dict[str, Maker], arrivals: Sequence[Arrival], adapters: int, seed: int) -> dict[str, float]:
    """What a fleet with these policies comes to.

    ttft_ms, ttft_p99_ms   until the first token: mean and 99th percentile
    reads   adapters read from disk
    hits    uses that find their adapter by the eviction policy alone: all, in order, at one memory of `MEMORY`

    Refused for policies whose answers are none, and if a request was never answered.
    """
    cost, sound = cost_model(), checked(makers, adapters)
    fleet = fleet_of(sound, adapters, seed, cost)
    fleet.serve(arrivals)
    if left := sum(replica.load for replica in fleet.replicas):
        raise Refused(f"{left} of {len(arrivals)} requests were never answered")
    said, sizes = report(fleet), fleet.replicas[0].adapters
    waits = [served.first_s - served.arrival.time_s for served in fleet.requests]
    policy = sound["eviction"](lambda adapter_id: cost.read_seconds(sizes[adapter_id].num_bytes))
    return {
        "ttft_ms": 1e3 * sum(waits) / len(waits),
        "ttft_p99_ms": said["ttft_p99_ms"],
        "reads": said["reads"],
        "hits": hits(uses_of(arrivals), MEMORY, policy),
    }


def uses_of(arrivals: Iterable[Arrival]) -> list[int]:
    """Adapter ids, in order of arrival."""
    return [arrival.adapter + 1 for arrival in arrivals]


def bounds(traffic: Traffic) -> dict[str, float]:
    """What no policy goes below (`hits`: above), by the names of `play`."""
    arrivals = traffic.arrivals()
    uses = uses_of(arrivals)
    return {
        "ttft_ms": 1e3 * least_ttft(arrivals, cost_model(), ENGINES, ROWS, TOKENS),
        "reads": len(set(uses)),  # each is read once at least, wherever
        "hits": belady_hits(uses, MEMORY),
    }


def share(figures: Mapping[str, float], own: Mapping[str, float], least: Mapping[str, float]) -> float:
    """Of the mean time to first token on a traffic: 1 is the engine's own, 0 is the bound."""
    return (figures["ttft_ms"] - least["ttft_ms"]) / (own["ttft_ms"] - least["ttft_ms"])
