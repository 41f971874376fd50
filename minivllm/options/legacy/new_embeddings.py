"""Embeddings of tokens that an adapter adds, from its folder. Stands for a part of vllm/lora/models.py up to 0.10.

Beside its weights an adapter has a file `new_embeddings.safetensors` with

    input_embeddings    (n, H) read by the model for ids V .. V + n - 1
    output_embeddings   (n, H) what these tokens' logits are made with
"""

import torch

from minivllm.config import DTYPES
from minivllm.lora.lora_model import LoRAModel

INPUT, OUTPUT = "input_embeddings", "output_embeddings"
FILES = ("new_embeddings.safetensors", "new_embeddings.bin")  # the first that is there is read


def check_new_embeddings(path: str, tensors: dict[str, torch.Tensor]) -> None:
    """ValueError that names the file of these tensors for other names, shapes or dtypes, and where the two differ in
    their number of tokens."""
    if unknown := sorted(tensors.keys() - {INPUT, OUTPUT}):
        raise ValueError(f"'{path}' holds {', '.join(unknown[:4])}; only {INPUT} and {OUTPUT} are read")
    if INPUT not in tensors:
        raise ValueError(f"'{path}' has no {INPUT}; without them the added tokens cannot be read")
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or 0 in tensor.shape or tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"'{path}': {name} must be floats of shape (tokens, hidden size), got {tuple(tensor.shape)} "
                f"of {tensor.dtype}"
            )
    if len({len(tensor) for tensor in tensors.values()}) > 1:
        raise ValueError(
            f"'{path}' has {len(tensors[INPUT])} {INPUT} but {len(tensors[OUTPUT])} {OUTPUT}; "
            "give both for every added token, or no output_embeddings at all"
        )


def put_beside(
    lora: LoRAModel,
    tensors: dict[str, torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Put `new_embeddings`, in the adapter's dtype, and `added_tokens`, their number, beside an adapter.

    ValueError that names one with NaN, or Inf once converted.
    """
    converted = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    for name, tensor in converted.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise ValueError(f"{name} of the added tokens hold NaN or Inf as {tensor.dtype}")
    lora.beside |= {"new_embeddings": converted, "added_tokens": len(tensors[INPUT])}
