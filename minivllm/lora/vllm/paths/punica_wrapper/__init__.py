"""vLLM's path of the arithmetic; the names are in lora/vllm, the work in lora/backend.py."""


def __getattr__(name: str) -> object:
    from minivllm.lora.vllm import punica_selector

    return getattr(punica_selector, name)
