"""Biases on B in adapters (PEFT's `lora_bias`). Stands for a part of vllm/lora/models.py up to 0.10."""

from typing import Any

import torch

import minivllm.lora.seams as seams
from minivllm.config import DTYPES, LoRAConfig
from minivllm.lora.checks import unsupported
from minivllm.lora.peft_helper import PEFTHelper

FIELD, END = "lora_bias", ".lora_B.bias"


def check_bias(value: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig) -> list[str]:
    """What is wrong with a config that says `lora_bias`."""
    if not value or lora_config.bias_enabled:
        return []
    return [
        "Adapter bias cannot be used without bias_enabled: this adapter has a bias on B (lora_bias); "
        "pass --enable-lora-bias."
    ]


def read_bias(name: str, tensor: torch.Tensor, peft_helper: PEFTHelper) -> tuple[str, str, torch.Tensor]:
    """A bias (N,) as (1, N), by the name of the B that it stands beside.

    ValueError names what is no vector of floats, and any bias where the config does not say `lora_bias`.
    """
    if not peft_helper.config.get(FIELD) or not name.endswith(END):
        raise ValueError(unsupported(name))
    if tensor.ndim != 1 or tensor.dtype not in DTYPES.values():
        raise ValueError(
            f"{name} must be one vector of floats, got shape {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return f"{name.removesuffix('bias')}weight", "bias", tensor[None]  # (1, N)


seams.config_checks[FIELD] = check_bias
seams.tensor_readers[END] = read_bias
