"""The rotary factor of an adapter trained at a longer context. Stands for a part of vllm/lora/peft_helper.py (v0.9)."""

import math
from typing import Any

import minivllm.lora.seams as seams
from minivllm.config import LoRAConfig
from minivllm.errors import is_integral, shown
from minivllm.lora.peft_helper import PEFTHelper

FIELD = "context_length"
# Longer than any model. What a file gives goes into float arithmetic, which a JSON int can overflow.
LONGEST_CONTEXT = 2**32


def read_context_length(peft_helper: PEFTHelper, length: Any) -> None:
    """Put `scaling_factor` beside a config: by how much it stretches the base model's positions, if at all.

    It is ceil(context_length / vllm_max_position_embeddings). ValueError for what is no length.
    """
    if not is_integral(length) or not 0 <= length <= LONGEST_CONTEXT:
        raise ValueError(f"context_length must be an int from 1 to {LONGEST_CONTEXT}, got {shown(length)}")
    positions = peft_helper.vllm_max_position_embeddings
    factor = float(math.ceil(length / positions)) if positions else 1.0
    if factor > 1:
        peft_helper.beside["scaling_factor"] = factor


def check_context_length(length: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig) -> list[str]:
    """What is wrong with a config whose factor the engine was not started with."""
    factor = peft_helper.beside.get("scaling_factor", 1.0)
    factors = lora_config.long_lora_scaling_factors or ()
    if factor == 1 or factor in factors:
        return []
    return [
        f"context_length {length} needs rotary factor {factor}, but long_lora_scaling_factors has "
        f"{list(factors) or 'none'}; pass --long-lora-scaling-factors {','.join(map(str, (*factors, factor)))}."
    ]


seams.config_readers[FIELD] = read_context_length
seams.config_checks[FIELD] = check_context_length
