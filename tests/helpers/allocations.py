"""What the allocator says, for tests of what we say that things take."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile


def allocated_by(run: Callable[[], Any], with_numpy: bool = False) -> tuple[Any, int]:
    """What `run` returns, and the bytes that PyTorch's CPU allocator gave out meanwhile and has not got back.

    with_numpy   NumPy's as well: adapters are read into its arrays
    """
    gc.collect()  # else what others left would be given back in here
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
        gc.collect()
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    of_numpy = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)
    tracemalloc.stop()
    events = profiler.profiler.kineto_results.events()
    return result, with_numpy * of_numpy + sum(
        event.nbytes() for event in events if event.name() == "[memory]"
    )


def live_bytes(device: str = "cpu") -> int:
    """Bytes of all memory that tensors anywhere in the process hold; also on "meta", where nothing is allocated."""
    gc.collect()
    # By their types: not every object likes to be asked what it is, and it takes long.
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.layout == torch.strided]
    return sum(
        s.nbytes() for s in {tensor.untyped_storage() for tensor in tensors} if s.device.type == device
    )
