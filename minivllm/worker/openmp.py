"""The number of threads of PyTorch's operators. Stands for what vllm/v1/worker/cpu_worker.py (v0.22.1) sets."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch


def set_num_threads(number: int) -> None:
    """Have the calling thread compute on `number` threads, as `torch.set_num_threads` does, if OpenMP can be asked.

    PyTorch's own call also tells MKL the number, and to keep to it inside a parallel region. From then on each
    product in attention, which is one already, starts threads of its own and takes twice as long.
    """
    torch.get_num_threads()  # a thread's first question sets its number; it has to come before ours
    if set_in_openmp := _openmp():
        set_in_openmp(number)
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


@functools.cache
def _openmp() -> Callable[[int], None] | None:
    """`omp_set_num_threads` of the OpenMP that PyTorch brings along; None where it brings none."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/lib*omp*")):
        if path.name.startswith(("libgomp", "libiomp", "libomp")):
            function = ctypes.CDLL(str(path)).omp_set_num_threads
            function.argtypes, function.restype = [ctypes.c_int], None
            return function
    return None
