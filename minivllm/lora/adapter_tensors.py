"""Whose the tensors of an adapter are. Stands for `LoRAModel.from_lora_tensors`, vllm/lora/lora_model.py (v0.22.1)."""

from functools import partial

import torch

import minivllm.lora.seams as seams
from minivllm.lora.checks import check_numbers, check_pair, check_tensor
from minivllm.lora.module_weights import LoRALayerWeights
from minivllm.lora.names import WeightsMapper, is_left_out, parse_fine_tuned_lora_name
from minivllm.lora.peft_helper import PEFTHelper

# Name in the model, name in training -> "lora_A", "lora_B" and what options read beside B, such as "bias".
Pairs = dict[tuple[str, str], dict[str, torch.Tensor]]


def read_tensor(
    name: str, tensor: torch.Tensor, peft_helper: PEFTHelper
) -> tuple[str, str | None, torch.Tensor]:
    """(name, None, tensor) of an A or B as it is; of others what options read in it (`seams.tensor_readers`).

    That is an A or B likewise; or the name of a B, what the tensor is beside that, such as "bias", and the tensor.
    """
    for mark, read in seams.tensor_readers.items():
        if mark in name:
            return read(name, tensor, peft_helper)
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

    tensors          PEFT name -> tensor; A (r, K), B (N, r), in any order. Those of `is_left_out` are left out
    vocab_size       the width that the A of an embedding must have, None = any
    weights_mapper   gives the names that modules have in the model. The config's patterns know only the names without

    `read_tensor` gives the tensor to take; where that is the tensor itself `check_tensor` looks at it.

    Raises ValueError naming the tensor: a name that is not LoRA's, or one side of a module there twice (with PEFT's
    prefix and without); and when there are no LoRA weights at all.
    """
    pairs: Pairs = {}
    for name, tensor in tensors.items():
        if is_left_out(name, skip_prefixes):
            continue
        plain_name, kind, read = read_tensor(name, tensor, peft_helper)
        module, is_lora_a = parse_fine_tuned_lora_name(plain_name, weights_mapper)
        trained_as, _ = parse_fine_tuned_lora_name(plain_name)
        if read is tensor:
            check_tensor(name, tensor, vocab_size)
        side = kind or ("lora_A" if is_lora_a else "lora_B")
        pair = pairs.setdefault((module, trained_as), {})
        if side in pair:
            raise ValueError(f"{name} is there twice, with and without the prefix that PEFT writes")
        pair[side] = read
    if not pairs:
        raise ValueError("the adapter holds no LoRA weights")
    return pairs


def to_weights(
    pairs: Pairs,
    peft_helper: PEFTHelper,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, LoRALayerWeights]:
    """Module -> its weights, of the tensors' own ranks, with the config's scaling; converted when all were judged.

    dtype   None = leave

    The scaling is noted, not applied to B: that is `optimize`'s work. What is beside B is scaled at once.

    Raises ValueError naming a module that is there under two names which the mapper makes one. `check_pair`, and
    `check_numbers` once the scaling is known, find the rest.
    """
    loras: dict[str, LoRALayerWeights] = {}
    for (module, trained_as), pair in pairs.items():
        if module in loras:
            raise ValueError(f"{module} is there twice: {trained_as} is a second name for it")
        check_pair(module, pair, peft_helper.ranks)
        lora = LoRALayerWeights.from_config(trained_as, peft_helper, rank=pair["lora_A"].shape[-2])
        if not pair["lora_A"].is_meta:
            check_numbers(module, pair, lora.scaling, dtype)
        lora.module_name = module
        lora.lora_a, lora.lora_b = pair.pop("lora_A"), pair.pop("lora_B")  # (r, K), (N, r)
        lora.beside = {kind: tensor * lora.scaling for kind, tensor in pair.items()}  # (1, N)
        loras[module] = lora
    convert = partial(torch.Tensor.to, device=device, dtype=dtype)
    for lora in loras.values():
        lora.replace_tensors(convert)
    return loras


# endregion
