"""Where kernels run in this test run: on the GPU if there is one, else through Triton's interpreter."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def taking_turns(alone: bool, file: Path | None = None) -> Iterator[None]:
    """Use the GPU beside the tests of other processes; `alone`: when none of them runs, and until this one ends.

    Free memory is the device's, not a process's. Waiting holds nothing, so a test may start processes that run tests.

    file   what is locked; by default one for all test runs of this user
    """
    file = file or Path(tempfile.gettempdir()) / f"minivllm-gpu-{os.getuid()}.lock"
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
