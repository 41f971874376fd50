"""Names and module replacement under vLLM's one name for both. Stands for vllm/lora/utils.py (v0.22.1)."""


def __getattr__(name: str) -> object:
    from minivllm.lora.vllm import utils

    return getattr(utils, name)
