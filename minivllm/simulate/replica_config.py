"""What a simulated engine has. Stands for `minivllm.config.EngineConfig`."""

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
    blocks_a_page   KV blocks in whose memory a further page lies, when nobody needs them
    """

    pages: int
    blocks_a_page: int


@dataclass(frozen=True)
class ReplicaConfig:
    """What one engine has, and how it decides.

    elastic          None = `lora.max_loras` slots; else adapters lie in pages, and slots are rows of a table
    parallel_reads   adapters read beside the steps at a time, or read for requests that still wait
    reads_beside     adapters are read beside the steps, as the server does; else a step waits, as `LLM` does
    keeping          makes a policy for one tier, from what bringing an adapter back costs; None = the engine's own
    scheduling       makes a policy for one replica, from its adapters' ranks; None = the engine's own
    prefetching      makes a policy for one replica; None = nothing is read ahead
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(num_blocks=8192))
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    max_model_len: int | None = None
    elastic: Elastic | None = None
    parallel_reads: int = 2
    reads_beside: bool = True
    keeping: Callable[[Callable[[int], float]], KeepPolicy] | None = None
    scheduling: Callable[[Callable[[int], int]], SchedulingPolicy] | None = None
    prefetching: Callable[[], PrefetchPolicy] | None = None
