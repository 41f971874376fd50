"""Between host and device without waiting. Stands for `async_tensor_h2d` of vllm/utils/torch_utils.py (v0.22.1)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[float]] | np.ndarray | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The numbers as a tensor there. The host does not wait for what the device is doing."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(*tensors: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Start the way of tensors to the host, and give a call that waits for them as they are now."""
    if not tensors[0].is_cuda:
        copies = tuple(tensor.clone() for tensor in tensors)
        return lambda: copies
    there = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(there, tensors):
        host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> tuple[torch.Tensor, ...]:
        arrived.synchronize()
        return tuple(there)

    return wait
