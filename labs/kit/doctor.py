"""`lab doctor`: whether everything is there that the course needs."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from labs.kit.engine_state import complaint, edited, unreadable


class Finding(NamedTuple):
    """is_good: None = it is not, and the course does without"""

    name: str
    is_good: bool | None
    text: str


def examine() -> Iterator[Finding]:
    version = sys.version.split()[0]
    yield Finding("Python", sys.version_info >= (3, 11), f"{version}, 3.11 or newer is needed")
    yield _try("PyTorch", _torch)
    yield _try("transformers and PEFT", _oracles)
    yield _canary("float32")
    # Kernels are tested with bfloat16 on a GPU only where this does not hold.
    bf16 = _canary("bfloat16")
    yield bf16._replace(is_good=bf16.is_good or None)
    yield _try("GPU", _gpu, is_needed=False)
    yield _try("demo model", _model)
    yield _engine()


def _try(name: str, look: Callable[[], str], is_needed: bool = True) -> Finding:
    try:
        return Finding(name, True, look())
    except (ImportError, OSError, ValueError, LookupError, SyntaxError) as error:
        return Finding(name, False if is_needed else None, str(error))


def _torch() -> str:
    import torch

    return torch.__version__


def _oracles() -> str:
    import peft
    import transformers

    return f"{transformers.__version__} and {peft.__version__}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise LookupError("none; kernels run in Triton's interpreter")
    return torch.cuda.get_device_name()


def _model() -> str:
    from minivllm.models.demo_model import demo_model_path

    return str(demo_model_path(progress=False))


def _engine() -> Finding:
    files = edited()
    if files is None:
        return Finding("our code", None, "git does not know whether minivllm/ is as it was released")
    if not files:
        return Finding("our code", True, "minivllm/ is as in git")
    return Finding("our code", False if unreadable(files) else None, complaint(files))


def _canary(dtype: str) -> Finding:
    """Triton's interpreter, in a process of its own: it is chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "labs.kit.canary", dtype]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = (run.stdout or run.stderr).strip().split("\n")[-1]
    return Finding(f"Triton's interpreter, {dtype}", run.returncode == 0, said)
