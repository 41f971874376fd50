"""Bytes that tensors keep allocated. vLLM (v0.22.1) counts none of vllm/lora/."""

from collections.abc import Iterable

import torch


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors keep allocated: each piece of memory once, all of it, however many views of it there are."""
    views = {tensor.untyped_storage(): tensor for tensor in tensors}
    return sum(_given_out(storage.nbytes(), view.is_pinned()) for storage, view in views.items())


def _given_out(nbytes: int, is_pinned: bool) -> int:
    # PyTorch gives page-locked memory out in powers of two.
    return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes
