"""Tokens that an adapter adds to the vocabulary. Stands for the extra vocabulary of vllm/lora/lora_model.py.

vLLM had it up to 0.10 and has dropped it (v0.22.1): there a base model is retrained for new tokens. Beside its
weights an adapter has a file `new_embeddings.safetensors` with

    input_embeddings    (n, H) read by the model for ids V .. V + n - 1
    output_embeddings   (n, H) what these tokens' logits are made with
"""

from collections.abc import Callable

import torch

from minivllm.config import DTYPES
from minivllm.lora.weights_files import find_new_embeddings_file, read_weights

INPUT, OUTPUT = "input_embeddings", "output_embeddings"


def read_new_embeddings(lora_dir: str, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's `new_embeddings` file, by their two names; {} where there is no file.

    ValueError names the file for one that cannot be read, for other names, shapes or dtypes, and where the two
    differ in their number of tokens.
    """
    path = find_new_embeddings_file(lora_dir)
    if path is None:
        return {}
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


def count_added_tokens(tensors: dict[str, torch.Tensor]) -> int:
    """How many tokens new embeddings are for."""
    return max(map(len, tensors.values()), default=0)


def convert_new_embeddings(
    tensors: dict[str, torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors in the adapter's dtype. ValueError that names one with NaN, or Inf once converted."""
    converted = {name: convert(tensor) for name, tensor in tensors.items()}
    for name, tensor in converted.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise ValueError(f"{name} of the added tokens hold NaN or Inf as {tensor.dtype}")
    return converted
