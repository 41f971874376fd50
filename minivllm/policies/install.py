"""The policies that a configuration names. The simulator's engines take the same objects."""

from functools import partial

from minivllm.config import LoRAConfig, SchedulerConfig
from minivllm.core.scheduler import SchedulingPolicy
from minivllm.lora.tiers import MakeCache, least_recently_used
from minivllm.parts import GetAdapter, Parts
from minivllm.policies import keeping, scheduling


def add_to(parts: Parts) -> None:
    parts.make_policy = scheduling_policy
    if parts.config.lora_config is not None:
        parts.manager["make_cache"] = cache_as_configured(parts.config.lora_config)


def rank_of(get_adapter: GetAdapter, adapter_id: int) -> int:
    """The rank of an adapter in memory; 0 for base, and of one that was not read yet."""
    adapter = get_adapter(adapter_id)
    return adapter.rank if adapter is not None else 0


def scheduling_policy(config: SchedulerConfig, get_adapter: GetAdapter) -> SchedulingPolicy:
    """The order that is configured, for one engine."""
    return scheduling.POLICIES[config.policy](partial(rank_of, get_adapter))


def cache_as_configured(config: LoRAConfig) -> MakeCache:
    """What makes the caches of the tiers, which evict by the configured policy."""
    if config.eviction_policy == "lru":
        return least_recently_used
    make = keeping.POLICIES[config.eviction_policy]
    # What there is to read grows with the rank.
    return lambda capacity, get_adapter: keeping.PolicyCache(capacity, make(partial(rank_of, get_adapter)))
