"""Which model runner a configuration needs. Stands for vllm/v1/worker/gpu_worker.py (v0.22.1), which makes one."""

from minivllm.config import EngineConfig
from minivllm.worker.model_runner import ModelRunner


def make_runner(config: EngineConfig) -> ModelRunner:
    """The plain one, unless the configuration asks for more."""
    if config.model_config.batch_invariant:
        from minivllm.worker.invariant_runner import InvariantRunner

        return InvariantRunner(config)
    return ModelRunner(config)
