"""What cannot be asked of a base model. Stands for the checks in vllm/config/model.py (v0.22.1)."""

import importlib.util
import os

import torch

from minivllm.errors import shown
from minivllm.models.config import ModelArchitecture

TORCHAO_REQUIREMENT = "torchao>=0.18,<0.19"


def check_quantization(quantization: str, dtype: str | torch.dtype) -> None:
    """ValueError for what torchao cannot do, ModuleNotFoundError where it is missing."""
    if quantization != "torchao":
        raise ValueError(
            f"quantization {shown(quantization)} is not supported; use torchao, or None for the weights as stored"
        )
    # It multiplies by the int8 numbers before it scales, and so leaves float16's range; float64 it does not know.
    if dtype in (torch.float16, torch.float64):
        raise ValueError(
            f"quantization 'torchao' computes in float32 or bfloat16, but the dtype is {dtype}; "
            "pass --dtype bfloat16 or float32"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError(
            "quantization 'torchao' needs the package torchao, which is not installed; "
            f"run `pip install '{TORCHAO_REQUIREMENT}'`"
        )


def check_batch_invariant(quantization: str | None, architecture: ModelArchitecture) -> None:
    """ValueError for what has no kernel that sums in one order."""
    if quantization is not None:
        raise ValueError(f"batch_invariant does not go with quantization {quantization!r}; leave one out")
    if architecture.num_experts:
        raise ValueError(
            f"batch_invariant does not know experts, but {architecture.architecture} has "
            f"{architecture.num_experts} of them in a layer; leave it out"
        )


def check_one_order(device: str, tensor_parallel_size: int) -> None:
    """ValueError for where `batch_invariant` cannot be kept."""
    # The variable is Triton's own, for its interpreter: slow, and enough for tests.
    if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"batch_invariant needs a GPU, but the device is {device}; leave it out")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"batch_invariant does not go with tensor_parallel_size {tensor_parallel_size}: sums over ranks have "
            "another order; leave one out"
        )
