"""Dtypes and devices by name. Stands for parts of vllm/config/model.py and device.py (v0.22.1)."""

import torch

from minivllm.errors import shown

_DTYPE_NAMES = ("float32", "float", "float64", "double", "bfloat16", "float16", "half")
DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES}


def parse_dtype(dtype: str | torch.dtype, option: str = "dtype") -> torch.dtype:
    """A torch dtype from its name; ValueError lists the names there are."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown {option} {shown(dtype)}; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> str:
    """Where to run: "cpu", "cuda" or "cuda:N"; "auto" is "cuda" where there is a GPU, else "cpu".

    ValueError for another kind of device, or for a GPU that is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"device {shown(device)} is not supported; use auto, cpu, cuda or cuda:N")
    if parsed.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError(f"device '{device}' was asked for but PyTorch finds no CUDA GPU; use cpu or auto")
    if parsed.index is not None and parsed.index >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}' was asked for but there are only {torch.cuda.device_count()} GPUs, "
            "counted from cuda:0"
        )
    return str(parsed)
