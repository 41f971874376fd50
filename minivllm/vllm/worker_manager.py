"""vLLM's managers that read adapters, which may have all options. Stands for vllm/lora/worker_manager.py (v0.22.1)."""

from typing import Any

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.lora import worker_manager

__all__ = ["LRUCacheWorkerLoRAManager", "WorkerLoRAManager"]


class LRUCacheWorkerLoRAManager(worker_manager.LRUCacheWorkerLoRAManager):
    """vLLM: the same name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"extensions": LORA_EXTENSIONS, **options})


class WorkerLoRAManager(worker_manager.WorkerLoRAManager):
    """vLLM: the same name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"extensions": LORA_EXTENSIONS, **options})
