"""Whose the tensors of an adapter are. Stands for `LoRAModel.from_lora_tensors`, vllm/lora/lora_model.py (v0.22.1)."""

from labs.kit.overlay import Todo
from functools import partial

import torch

from minivllm.lora.checks import check_numbers, check_pair, check_tensor
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import WeightsMapper, is_left_out, parse_fine_tuned_lora_name
from minivllm.lora.peft_helper import PEFTHelper

# Name in the model, name in training -> "lora_A", "lora_B" and what options read beside B, such as "bias".
Pairs = dict[tuple[str, str], dict[str, torch.Tensor]]


def read_tensor(
    name: str, tensor: torch.Tensor, peft_helper: PEFTHelper
) -> tuple[str, str | None, torch.Tensor]:
    """What a tensor is: (name, kind, tensor).

    name   of an A or a B, as `parse_fine_tuned_lora_name` reads it
    kind   None for A and B themselves; "bias", say, for what belongs beside that B

    An option that knows such names (`tensor_marks`) may give a tensor another name or shape. All else stays as it is.
    """
    for mark, option in peft_helper.extensions.tensor_marks:
        if mark in name:
            return option.read_tensor(name, tensor, peft_helper)
    return name, None, tensor


# region lab 1.6: from tensors to modules
def pair_up(
    tensors: dict[str, torch.Tensor],
    peft_helper: PEFTHelper,
    vocab_size: int | None = None,
    weights_mapper: WeightsMapper | None = None,
    skip_prefixes: list[str] | None = None,
) -> Pairs:
    """The A and B of every module together, and what options read beside B.

    The keys are (name in the model, name in training): with the mapper, and without it. A plain adapter has "lora_A"
    and "lora_B" under each. What an option read comes under its kind, such as "bias".

    tensors          PEFT name -> tensor; A (r, K), B (N, r), in any order. Those of `is_left_out` are left out
    vocab_size       the width that the A of an embedding must have, None = any
    weights_mapper   gives the model's names of modules. The config's patterns know the checkpoint's names

    `read_tensor` says what each tensor is. Where it gives the same tensor back, `check_tensor` judges it.

    ValueError names a tensor whose name is not LoRA's, or one that is there twice (with PEFT's prefix and without). It
    is raised, too, when there are no LoRA weights at all.

    To use: `parse_fine_tuned_lora_name(name, mapper)` (names.py), `check_tensor(name, tensor, vocab_size)` (checks.py).
    """
    raise Todo("lab 1.6: from tensors to modules")


def to_weights(
    pairs: Pairs,
    peft_helper: PEFTHelper,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, LoRALayerWeights]:
    """Module -> its weights. Ranks are the tensors' own, scalings the config's. All are judged before one is converted.

    Of experts an option may read A as (E, r, K) and B as (E, N, r). Their rank is r, too.

    dtype   None = leave

    The scaling is noted, not applied to B: that is `optimize`'s work. What is beside B is scaled here, once it is
    converted: a bias of 16 bits that is scaled in 16 bits has other numbers than PEFT's.

    ValueError names a module that has two names in the checkpoint. `check_pair` judges shapes. `check_numbers` judges
    numbers, with the scaling. Shapes alone (meta) have no numbers to judge or to convert.

    To use: `LoRALayerWeights.from_config(name, peft_helper, rank)` and `replace_tensors` (lora_weights.py),
    `check_pair(module, pair, peft_helper.ranks)` and `check_numbers(module, pair, scaling, dtype)` (checks.py).
    """
    raise Todo("lab 1.6: from tensors to modules")


# endregion
