"""vLLM's path of the products in `by_token` and `by_run`. Stands for vllm/lora/ops/torch_ops (v0.22.1)."""


def __getattr__(name: str) -> object:
    from minivllm.lora.vllm import torch_ops

    return getattr(torch_ops, name)
