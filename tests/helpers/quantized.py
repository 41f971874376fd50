"""The same quantization by transformers and torchao, and what is stored for quantized weights."""

from pathlib import Path

import torch
from tiny_oracle import Oracle


def quantization_config():
    """For from_pretrained: what `quantization="torchao"` is here."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))


def quantized_oracle(base: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32) -> Oracle:
    """transformers' model, quantized when loaded, with PEFT's adapters, name -> folder, on top of it."""
    oracle = Oracle(base, dtype, quantization_config=quantization_config())
    for name, folder in adapters.items():
        oracle.load(name, folder)
    return oracle


def dequantized_oracle(ours: torch.nn.Module, base: Path, adapters: dict[str, Path]) -> Oracle:
    """transformers and PEFT in float64 on the numbers that our int8 weights stand for.

    A GPU rounds to int8 a little otherwise than a CPU, so a model that was quantized there is another model.
    """
    oracle = Oracle(base)
    for name in quantized_names(ours):
        path = name.removesuffix(".weight")
        parent, _, last = path.removesuffix(".base_layer").rpartition(".")
        parts = ours.packed_modules_mapping.get(last, [last])
        heights = getattr(ours.get_submodule(path), "output_sizes", None)
        weight = ours.get_parameter(name).dequantize().double().cpu()
        for part, rows in zip(parts, weight.split(heights or len(weight)), strict=True):
            oracle.base.get_submodule(f"{parent}.{part}").weight.data = rows
    for name, folder in adapters.items():
        oracle.load(name, folder)
    return oracle


def quantized_names(model: torch.nn.Module) -> set[str]:
    """Of the parameters that are in int8."""
    from torchao.quantization import Int8Tensor

    return {name for name, weight in model.named_parameters() if isinstance(weight, Int8Tensor)}


def stored_bytes(weight: torch.Tensor) -> int:
    """Of a weight, or of all that a quantized one is made of."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    pieces, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, piece).nbytes for piece in pieces)
