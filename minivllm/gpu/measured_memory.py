"""The KV cache of a GPU: what weights, slots and the largest step leave. Stands for `determine_available_memory` of
vllm/v1/worker/gpu_worker.py (v0.22.1).
"""

from functools import partial

from minivllm.gpu.cuda_graphs import mixed_sizes
from minivllm.gpu.gpu_memory import memory_left
from minivllm.worker.kv_memory import KVMemory
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.warm_up import largest_step, profile_run


class MeasuredMemory(KVMemory):
    """A `KVMemory` that runs the largest step, and takes what it leaves.

    captures   whether steps will be captured: graphs have memory of their own
    """

    def __init__(self, captures: bool) -> None:
        self.captures = captures

    def measure(self, runner: ModelRunner) -> int:
        """ValueError when the GPU has not even room for two blocks."""
        config = runner.config
        captured = mixed_sizes(config.scheduler_config.max_num_batched_tokens)[-1]
        share = captured / sum(largest_step(config)) if self.captures else 0
        return memory_left(
            partial(profile_run, runner),
            runner.device,
            config.cache_config.gpu_memory_utilization,
            share,
            least=2 * runner.kv_block_bytes,
        )
