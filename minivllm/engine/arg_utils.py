"""Engine options as one flat list. Stands for vllm/engine/arg_utils.py (v0.22.1)."""

from dataclasses import dataclass

from minivllm.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from minivllm.validation import require_bool


@dataclass
class EngineArgs:
    """Every option of `LLM` and of the command line; config.py says what each means. vLLM: `EngineArgs`."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    quantization: str | None = None
    max_logprobs: int = 20
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    target_modules: list[str] | None = None
    fully_sharded_loras: bool = False
    punica_backend: str = "auto"
    bias_enabled: bool = False
    lora_extra_vocab_size: int = 0
    long_lora_scaling_factors: tuple[float, ...] | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_lora_wait_steps: int = 64
    tensor_parallel_size: int = 1
    warm_up: bool = True
    threads: int | None = None

    def create_engine_config(self) -> EngineConfig:
        """The validated configuration. ValueError or FileNotFoundError for what cannot be."""
        require_bool(enable_lora=self.enable_lora, warm_up=self.warm_up)
        lora_config = LoRAConfig(
            max_lora_rank=self.max_lora_rank,
            max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras,
            lora_dtype=self.lora_dtype,
            target_modules=self.target_modules,
            fully_sharded_loras=self.fully_sharded_loras,
            punica_backend=self.punica_backend,
            bias_enabled=self.bias_enabled,
            lora_extra_vocab_size=self.lora_extra_vocab_size,
            long_lora_scaling_factors=self.long_lora_scaling_factors,
        )
        return EngineConfig(
            model_config=ModelConfig(
                self.model,
                self.dtype,
                self.max_model_len,
                self.seed,
                self.load_format,
                self.skip_tokenizer_init,
                self.enforce_eager,
                self.quantization,
                position_factor=max(lora_config.long_lora_scaling_factors or (), default=1.0)
                if self.enable_lora
                else 1.0,
                max_logprobs=self.max_logprobs,
            ),
            cache_config=CacheConfig(
                self.block_size,
                self.num_kv_blocks,
                self.kv_cache_memory_bytes,
                self.enable_prefix_caching,
                self.gpu_memory_utilization,
            ),
            scheduler_config=SchedulerConfig(
                self.max_num_seqs, self.max_num_batched_tokens, self.max_lora_wait_steps
            ),
            lora_config=lora_config if self.enable_lora else None,
            parallel_config=ParallelConfig(self.tensor_parallel_size),
            device=self.device,
            threads=self.threads,
        )
