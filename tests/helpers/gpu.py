"""Where kernels run in this test run: on the GPU if there is one, else through Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="not verified here: needs CUDA")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever reads from the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
