"""Where adapters come from beside local folders of safetensors. vLLM: inside vllm/lora/ and vllm/plugins/."""

from minivllm.sources import bin, by_name, hub, memory

__all__ = ["bin", "by_name", "hub", "memory"]
