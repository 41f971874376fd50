"""vLLM's path to resolvers, which are around the core. Stands for vllm/lora/resolver.py (v0.22.1)."""


def __getattr__(name: str) -> object:
    from minivllm.lora.io import resolver

    return getattr(resolver, name)
