"""An engine takes the policies that its configuration names. The simulator's engines take the same objects."""

from functools import partial

from minivllm.config import EngineConfig
from minivllm.core.scheduler import Scheduler
from minivllm.lora.tiers import AdapterTiers
from minivllm.policies import keeping, scheduling
from minivllm.policies.keeping import install_keeping
from minivllm.policies.scheduling import install_scheduling

# By these an engine goes whose configuration names no other, and they are its own code.
DEFAULTS = ("fcfs", "lru")


def rank_in(tiers: AdapterTiers | None, adapter_id: int) -> int:
    """The rank of an adapter in memory; 0 for base, and of one that was not read yet."""
    adapter = tiers.get_adapter(adapter_id) if tiers is not None else None
    return adapter.rank if adapter is not None else 0


def install_policies(config: EngineConfig, scheduler: Scheduler, tiers: AdapterTiers | None) -> None:
    """Have the scheduler and the tiers, which are empty, go by the configured policies.   tiers: None without LoRA"""
    rank_of = partial(rank_in, tiers)
    if config.scheduler_config.policy not in DEFAULTS:
        install_scheduling(scheduler, scheduling.POLICIES[config.scheduler_config.policy](rank_of))
    if tiers is not None and config.lora_config.eviction_policy not in DEFAULTS:
        make = keeping.POLICIES[config.lora_config.eviction_policy]
        install_keeping(tiers, lambda: make(rank_of))  # what there is to read grows with the rank
