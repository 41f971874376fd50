"""Wrapped layers: a base layer each, with slots for adapters. Stands for vllm/lora/layers/ (v0.22.1)."""


def __getattr__(name: str) -> object:
    from minivllm.lora.vllm import layers

    return getattr(layers, name)
