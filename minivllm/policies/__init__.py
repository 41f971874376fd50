"""Who is kept, who goes first, what is read ahead, which engine gets a request. vLLM (v0.22.1) has one answer each.

Brings      choices for traffic that the core's answers (`lru`, `fcfs`) do not suit. Simulated on eight traffics,
            `gdsf` had 99th percentiles of first tokens that were 3 to 10 % shorter on four of them and 5 % longer on
            one; of four engines, `affine` had the best tail on four traffics and was within 9 % of it on the others
            (docs/simulate.md, policies-2026-11-23.json). On an H100 with eight slots `lfu` and `adapter-affine` did
            as the core's answers do
Implements  `SchedulingPolicy` of core/scheduler.py; `MakeCache` of lora/tiers.py (`PolicyCache`). Of the simulator
            alone: `PrefetchPolicy`, `RoutingPolicy`
Options     `eviction_policy`, `scheduling_policy`
Costs       some 640 lines. A policy other than `fcfs` looks at one waiting request an adapter in each step
"""

from typing import TYPE_CHECKING

from minivllm.extension import Extension

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _add_to(parts: "Parts") -> None:
    from minivllm.policies.install import add_to

    add_to(parts)


POLICIES = Extension(add_to=_add_to)
