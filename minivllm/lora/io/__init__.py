"""Where adapters come from beside local folders of safetensors. vLLM: inside vllm/lora/ and vllm/plugins/."""

from minivllm.lora.io import bin, hub, memory

__all__ = ["bin", "hub", "memory"]
