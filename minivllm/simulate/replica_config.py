"""The configuration of a simulated engine. Stands for `minivllm.config.EngineConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies.keeping import KeepPolicy
from minivllm.policies.prefetching import PrefetchPolicy
from minivllm.policies.scheduling import SchedulingPolicy


@dataclass(frozen=True)
class Elastic:
    """Memory that KV blocks and adapters share.

    pages           of `PAGE_RANKS` ranks each, which are the adapters' own
    blocks_a_page   KV blocks whose memory is one further page while they are free
    """

    pages: int
    blocks_a_page: int


@dataclass(frozen=True)
class ReplicaConfig:
    """The sizes and policies of one engine.

    elastic          None = `lora.max_loras` slots; else adapters lie in pages, and slots are rows of a table
    parallel_reads   adapters that are read concurrently, or have been read and wait for a step
    concurrent_reads   adapters are read concurrently with steps, as by the server; else a step waits, as in `LLM`
    keeping          makes an eviction policy for one tier, from the seconds of a reload; None = the engine's own
    scheduling       makes a policy for one replica, from its adapters' ranks; None = the engine's own
    prefetching      makes a policy for one replica; None = no prefetching
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(num_blocks=8192))
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    max_model_len: int | None = None
    elastic: Elastic | None = None
    parallel_reads: int = 2
    concurrent_reads: bool = True
    keeping: Callable[[Callable[[int], float]], KeepPolicy] | None = None
    scheduling: Callable[[Callable[[int], int]], SchedulingPolicy] | None = None
    prefetching: Callable[[], PrefetchPolicy] | None = None
