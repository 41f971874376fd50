"""Options of adapters, each in a file of its own; a plain adapter enters none. vLLM: inside vllm/lora/."""

from minivllm.lora.options import expert_weights, traits

__all__ = ["expert_weights", "traits"]
