"""Threads of operators, beside what PyTorch and MKL say of themselves."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from pathlib import Path
import torch
mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
if not hasattr(mkl, "mkl_serv_get_dynamic"):
    sys.exit("no MKL to ask")
if sys.argv[1] == "ours":
    from minivllm.worker.cpu_threads import set_num_threads
else:
    from torch import set_num_threads
set_num_threads(3)
print(torch.get_num_threads(), mkl.mkl_serv_get_dynamic())
set_num_threads(1)
print(torch.get_num_threads())
"""


def said_of(which):
    """What a fresh process prints: here the tests have told PyTorch a number already."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, which], capture_output=True, text=True)
    if "no MKL to ask" in done.stderr:
        pytest.skip("not verified here: needs a PyTorch that shows its MKL")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.nightly
def test_products_inside_a_parallel_region_start_no_threads_of_their_own():
    assert said_of("ours") == ["3", "1", "1"], "MKL decides the number by itself, as before"
    assert said_of("pytorchs")[:2] == ["3", "0"], (
        "PyTorch's own call takes that from MKL: the reason for ours"
    )
