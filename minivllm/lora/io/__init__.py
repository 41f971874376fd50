"""Where adapters come from beside a local folder of safetensors: the hub, resolvers, pickles. See vllm/lora/."""

from minivllm.lora.io import by_name

__all__ = ["by_name"]
