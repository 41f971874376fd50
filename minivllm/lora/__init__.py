"""Multi-LoRA: the core, and here what is plugged into it (see `seams`). Stands for vllm/lora/ (v0.22.1)."""

from minivllm import gpu, options, sources

__all__ = ["gpu", "options", "sources"]
