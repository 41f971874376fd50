"""Adapters of parameters. Stands for `_stack_moe_lora_weights` of vllm/lora/model_manager.py (v0.22.1).

Since transformers 5 a layer's experts are two parameters, `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I). PEFT
adapts one by its `target_parameters`, with one A and one B for all experts, and saves them folded into matrices:

    A (E * r, K)   expert by expert
    B (N, E * r)   rank by rank: column E * k + e is column k of expert e's B

Tensors are named by the module alone. A second parameter's adapter is wrapped around the first one's, in the order of
their declaration: `experts.base_layer.lora_A` is then of gate_up_proj, `experts.lora_A` of down_proj. Where only one is
adapted it is `experts.lora_A`, whichever it is: the config tells. vLLM takes it for down_proj's, and wants both.
"""

import re

import torch

from minivllm.lora.names import PEFT_PREFIX
from minivllm.lora.peft_helper import PEFTHelper

# In the order of their declaration.
PARAMETERS = ("gate_up_proj", "down_proj")
_FOLDED = re.compile(r"(.*\bexperts)((?:\.base_layer)*)(\.lora_([AB])\.weight)")
_UNFOLDED = re.compile(rf".*\bexperts\.(?:{'|'.join(PARAMETERS)})\.lora_[AB]\.weight")
_ENDS = tuple(f"experts.{parameter}.lora_{side}.weight" for parameter in PARAMETERS for side in "AB")


def is_unfolded(name: str) -> bool:
    """Whether `unfold_target_parameters` has given a tensor its name: it has a dimension for experts."""
    return name.endswith(_ENDS) and _UNFOLDED.fullmatch(name) is not None


def unfold_target_parameters(
    tensors: dict[str, torch.Tensor], peft_helper: PEFTHelper
) -> dict[str, torch.Tensor]:
    """All tensors, those of experts named by their parameter, and with the experts as a dimension of their own.

        ...experts.base_layer.lora_A.weight (E * r, H)   ->   ...experts.gate_up_proj.lora_A.weight (E, r, H)
        ...experts.lora_B.weight (H, E * r)              ->   ...experts.down_proj.lora_B.weight (E, H, r)

    r is the config's for the parameter. Whether E is the model's number of experts only the model can tell.

    Raises ValueError naming the tensor: for a parameter that `target_parameters` does not have, for a shape that is not
    that of experts of rank r, and for a tensor that has such a name already.
    """
    unfolded = {}
    for name, tensor in tensors.items():
        if is_unfolded(name):
            raise ValueError(
                f"{name} is unsupported LoRA weight: adapters of all experts are read as PEFT saves them"
            )
        is_whole = "experts.lora_" in name or "experts.base_layer." in name  # quicker than the expression
        if is_whole and (match := _FOLDED.fullmatch(name)):
            experts, nesting, end, side = match.groups()
            parameter = _parameter(experts.removeprefix(PEFT_PREFIX), nesting.count("."), peft_helper, name)
            tensor = _unfold(tensor, side == "A", peft_helper.rank(parameter), name)
            name = f"{experts}.{parameter.rpartition('.')[2]}{end}"
        unfolded[name] = tensor
    return unfolded


def _parameter(experts: str, depth: int, peft_helper: PEFTHelper, name: str) -> str:
    """The parameter that the wrapper at this depth adapts; the outermost, at depth 0, is the last one's."""
    adapted = [p for p in PARAMETERS if peft_helper.is_target_parameter(f"{experts}.{p}")]
    if depth >= len(adapted):
        raise ValueError(
            f"{name} adapts a parameter of all experts, but of {experts} target_parameters in adapter_config.json has "
            f"{'only ' + ' and '.join(adapted) if adapted else 'none'}"
        )
    return f"{experts}.{adapted[-1 - depth]}"


def _unfold(tensor: torch.Tensor, is_lora_a: bool, rank: int, name: str) -> torch.Tensor:
    """(E * r, K) -> (E, r, K), or (N, E * r) -> (E, N, r)"""
    if tensor.ndim != 2 or not tensor.numel() or tensor.shape[0 if is_lora_a else 1] % rank:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected {'rows' if is_lora_a else 'columns'} for experts of "
            f"rank {rank} each"
        )
    if is_lora_a:
        return tensor.unflatten(0, (-1, rank))
    return tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
