"""The policies that a configuration names. The simulator's engines take the same objects."""

from functools import partial

from minivllm.config import LoRAConfig, SchedulerConfig
from minivllm.core.scheduler import SchedulingPolicy
from minivllm.lora.tiers import AdapterTiers
from minivllm.policies import keeping, scheduling
from minivllm.policies.keeping import use_eviction_policy


def rank_in(tiers: AdapterTiers | None, adapter_id: int) -> int:
    """The rank of an adapter in memory; 0 for base, and of one that was not read yet."""
    adapter = tiers.get_adapter(adapter_id) if tiers is not None else None
    return adapter.rank if adapter is not None else 0


def scheduling_policy(config: SchedulerConfig, tiers: AdapterTiers | None) -> SchedulingPolicy:
    """The order that is configured, for one engine.   tiers: None without LoRA"""
    return scheduling.POLICIES[config.policy](partial(rank_in, tiers))


def evict_as_configured(config: LoRAConfig, tiers: AdapterTiers) -> None:
    """Have the tiers, which are empty, evict by the configured policy."""
    if config.eviction_policy != "lru":  # which is their own
        make = keeping.POLICIES[config.eviction_policy]
        use_eviction_policy(
            tiers, lambda: make(partial(rank_in, tiers))
        )  # what there is to read grows with the rank
