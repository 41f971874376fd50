"""Embeddings of tokens that an adapter adds, from its folder. Stands for a part of vllm/lora/models.py up to 0.10.

Beside its weights an adapter has a file `new_embeddings.safetensors` with

    input_embeddings    (n, H) read by the model for ids V .. V + n - 1
    output_embeddings   (n, H) what these tokens' logits are made with
"""

from pathlib import Path

import torch

import minivllm.lora.seams as seams
from minivllm.config import DTYPES
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.weights_files import files_in, read_weights

INPUT, OUTPUT = "input_embeddings", "output_embeddings"
FILES = ("new_embeddings.safetensors", "new_embeddings.bin")


def find_new_embeddings(lora_dir: str) -> Path | None:
    """The file in an adapter's folder, safetensors first; None where it adds no tokens."""
    return next(iter(files_in(lora_dir, FILES)), None)


def read_new_embeddings(path: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's file, by their two names.

    ValueError names the file for one that cannot be read, for other names, shapes or dtypes, and where the two
    differ in their number of tokens.
    """
    tensors = read_weights(path, shapes_only)
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
    return tensors


def add_new_embeddings(
    path: Path, lora: LoRAModel, device: torch.device | str, dtype: torch.dtype | None
) -> None:
    """Put `new_embeddings` and `added_tokens`, their number, beside an adapter. ValueError as for reading."""
    if "new_embeddings" not in lora.beside:  # the pickle beside safetensors is not read
        tensors = read_new_embeddings(path, shapes_only=torch.device(device).type == "meta")
        put_beside(lora, tensors, device, dtype)


def put_beside(
    lora: LoRAModel,
    tensors: dict[str, torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """The tensors in the adapter's dtype. ValueError that names one with NaN, or Inf once converted."""
    converted = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    for name, tensor in converted.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise ValueError(f"{name} of the added tokens hold NaN or Inf as {tensor.dtype}")
    lora.beside |= {"new_embeddings": converted, "added_tokens": len(tensors[INPUT])}


seams.folder_files |= dict.fromkeys(FILES, add_new_embeddings)
