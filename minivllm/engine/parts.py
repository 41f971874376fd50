"""What an engine is made of. Stands for `EngineCore.__init__` of vllm/v1/engine/core.py (v0.22.1)."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.distributed.executor import make_runner
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.parallel_sampling import ParallelSampling
from minivllm.policies.install import install_policies


class EngineParts:
    """Scheduler, model runner, adapters and outputs, made for a configuration.

    tokenizer   a transformers fast tokenizer; None = prompts come as token ids and answers have no text
    clock       seconds; everything that has a time has it from here
    adapters    None for an engine without LoRA
    parallel    the requests for more than one answer
    listeners   hear of every step that was launched, before its tokens are there; no decision asks them
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Any = None,
        warm_up: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.clock = clock
        self.runner = make_runner(config)
        self.runner.row_sampler.masks.tokenizer = tokenizer
        if warm_up:
            self.runner.warm_up()
        self.scheduler = self.runner.make_scheduler(
            config.scheduler_config,
            replace(config.cache_config, num_blocks=self.runner.num_blocks),
            config.lora_config,
            max_model_len=config.model_config.max_model_len,
            adapter_identity=self._adapter_identity,
            can_prefetch=self.runner.can_prefetch_lora,
        )
        self.adapters = None
        if config.lora_config is not None:
            self.adapters = AdapterRegistry(self.scheduler, self.runner.lora_manager, tokenizer is not None)
            self.scheduler.may_run = self.adapters.may_run
            self.scheduler.pinned_adapters = self.adapters.pinned
        install_policies(config, self.scheduler, self.adapters and self.adapters.manager)
        self.input_processor = InputProcessor(config.model_config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer, clock)
        self.parallel = ParallelSampling(self.scheduler, self.output_processor)
        self.metrics = EngineMetrics()
        self.listeners: list[Callable[[SchedulerOutput], None]] = []
        self._left_by: set[int] = set()  # adapters of requests that ended in this call

    def _adapter_identity(self, adapter_id: int) -> int | None:
        """A number that stands for the weights behind an id right now; None while they are not in memory."""
        lora = self.adapters.manager.get_adapter(adapter_id)
        return lora and lora.load_id
