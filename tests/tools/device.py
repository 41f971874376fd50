"""Where kernels run in this test run: on the GPU if there is one, else through Triton's interpreter."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="not verified here: needs CUDA")
# An engine on a CPU whose kernels are Triton's: its interpreter is not chosen where a GPU is.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs Triton's interpreter: a GPU is here"
)


def compile_for_gpu(*arguments: str | Path, cache: Path) -> subprocess.CompletedProcess:
    """What compiled_for_gpu.py says in a process of its own, which keeps what it compiles there."""
    command = [sys.executable, "-m", "tests.tools.compiled_for_gpu", *arguments]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


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
