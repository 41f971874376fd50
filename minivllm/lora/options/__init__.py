"""Options of adapters, each in a file of its own; a plain adapter enters none. vLLM: inside vllm/lora/."""

from minivllm.lora.options import (
    bias_tensors,
    context_length,
    expert_weights,
    new_embeddings,
    target_parameters,
    traits,
)

__all__ = [
    "bias_tensors",
    "context_length",
    "expert_weights",
    "new_embeddings",
    "target_parameters",
    "traits",
]
