"""Multi-LoRA: the core, and here what is plugged into it (see `seams`). Stands for vllm/lora/ (v0.22.1)."""

from minivllm.lora import gpu, io, options, reports, vllm

__all__ = ["gpu", "io", "options", "reports", "vllm"]

# Modules that vLLM has and the core has not, such as `minivllm.lora.utils`.
__path__.append(f"{__path__[0]}/vllm/paths")
