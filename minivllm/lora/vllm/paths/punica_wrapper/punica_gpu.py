"""Stands for vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1); what does the work is in lora/gpu."""


def __getattr__(name: str) -> object:
    from minivllm.lora.vllm import punica_gpu

    return getattr(punica_gpu, name)
