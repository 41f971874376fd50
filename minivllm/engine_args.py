"""All options of an engine as one flat list. Stands for vllm/engine/arg_utils.py (v0.22.1)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from minivllm.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from minivllm.errors import require_bool

# Options that are called otherwise here than in the configuration.
OPTION_NAMES = {
    "num_blocks": "num_kv_blocks",
    "memory_bytes": "kv_cache_memory_bytes",
    "policy": "scheduling_policy",
}


@dataclass
class EngineArgs:
    """Every option of `LLM` and of the command line; config.py says what each means. vLLM: `EngineArgs`."""

    model: str | os.PathLike[str]
    dtype: str = ModelConfig.dtype
    device: str = EngineConfig.device
    max_model_len: int | None = ModelConfig.max_model_len
    seed: int = ModelConfig.seed
    load_format: str = ModelConfig.load_format
    skip_tokenizer_init: bool = ModelConfig.skip_tokenizer_init
    enforce_eager: bool = ModelConfig.enforce_eager
    quantization: str | None = ModelConfig.quantization
    max_logprobs: int = ModelConfig.max_logprobs
    chat_template: str | os.PathLike[str] | None = ModelConfig.chat_template
    batch_invariant: bool = ModelConfig.batch_invariant
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int = LoRAConfig.max_lora_rank
    max_cpu_loras: int | None = LoRAConfig.max_cpu_loras
    lora_dtype: str = LoRAConfig.lora_dtype
    target_modules: list[str] | None = LoRAConfig.target_modules
    fully_sharded_loras: bool = LoRAConfig.fully_sharded_loras
    punica_backend: str = LoRAConfig.punica_backend
    bias_enabled: bool = LoRAConfig.bias_enabled
    lora_extra_vocab_size: int = LoRAConfig.lora_extra_vocab_size
    long_lora_scaling_factors: tuple[float, ...] | None = LoRAConfig.long_lora_scaling_factors
    block_size: int = CacheConfig.block_size
    num_kv_blocks: int | None = CacheConfig.num_blocks
    kv_cache_memory_bytes: int | None = CacheConfig.memory_bytes
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    enable_prefix_caching: bool = CacheConfig.enable_prefix_caching
    max_num_seqs: int = SchedulerConfig.max_num_seqs
    max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens
    max_lora_wait_steps: int = SchedulerConfig.max_lora_wait_steps
    tensor_parallel_size: int = ParallelConfig.tensor_parallel_size
    warm_up: bool = True
    threads: int | None = EngineConfig.threads
    enable_lora_bias: bool = LoRAConfig.enable_lora_bias
    enable_dora: bool = LoRAConfig.enable_dora
    refuse_pickles: bool = LoRAConfig.refuse_pickles
    async_scheduling: bool = SchedulerConfig.async_scheduling
    eviction_policy: str = LoRAConfig.eviction_policy
    scheduling_policy: str = SchedulerConfig.policy
    disable_custom_all_reduce: bool = ParallelConfig.disable_custom_all_reduce

    def create_engine_config(self) -> EngineConfig:
        """The validated configuration. ValueError or FileNotFoundError for what cannot be."""
        require_bool(enable_lora=self.enable_lora, warm_up=self.warm_up)
        lora_config = LoRAConfig(**self._options_of(LoRAConfig))
        factors = lora_config.long_lora_scaling_factors if self.enable_lora else None
        return EngineConfig(
            ModelConfig(**self._options_of(ModelConfig), position_factor=max(factors or (), default=1.0)),
            CacheConfig(**self._options_of(CacheConfig)),
            SchedulerConfig(**self._options_of(SchedulerConfig)),
            lora_config if self.enable_lora else None,
            ParallelConfig(**self._options_of(ParallelConfig)),
            device=self.device,
            threads=self.threads,
        )

    def _options_of(self, config: type) -> dict[str, Any]:
        """The options that a part of the configuration has, by its own names for them."""
        names = {field.name: OPTION_NAMES.get(field.name, field.name) for field in fields(config)}
        return {name: getattr(self, option) for name, option in names.items() if hasattr(self, option)}


def refuse_unknown_options(names: Iterable[str]) -> None:
    """TypeError for a name that no option has; it says the nearest ones."""
    known = [field.name for field in fields(EngineArgs)]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 2)
            nearest = f" (nearest: {', '.join(near)})" if near else ""
            raise TypeError(f"there is no option '{name}'{nearest}; EngineArgs has all that there are")
