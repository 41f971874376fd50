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
from typing import Any, ClassVar

import torch

from minivllm.config import LoRAConfig
from minivllm.errors import is_list_of_names, shown
from minivllm.lora.checks import check_tensor
from minivllm.lora.extensions import AdapterOption
from minivllm.lora.names import PEFT_PREFIX
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.options.expert_parts import DOWN, GATE_UP, SPELLINGS
from minivllm.options.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA

MOST_TARGET_PARAMETERS = 2048
# Ends of the parameters that may be adapted in the place of a module: of experts, and of what is a linear here.
ENDS = ("gate_up_proj", "down_proj", "weight")

# The experts', in the order of their declaration.
PARAMETERS = (GATE_UP, DOWN)
_FOLDED = re.compile(r"(.*\bexperts)((?:\.base_layer)*)(\.lora_([AB])\.weight)")
_UNFOLDED = re.compile(rf".*\bexperts\.(?:{'|'.join(PARAMETERS)})\.lora_[AB]\.weight")


class ExpertAdapters(AdapterOption):
    """Adapters on experts: of modules, one for each expert's linear, and of parameters, one for all experts."""

    config_field = "target_parameters"
    tensor_marks = ("experts.lora_", "experts.base_layer.", *(f"experts.{p}.lora_" for p in PARAMETERS))
    wrappers = (FusedMoEWithLoRA, FusedMoE3DWithLoRA)
    # Of whichever expert.
    part_names: ClassVar = {"experts": (*SPELLINGS[0], *SPELLINGS[1], GATE_UP)}

    def read_config(self, parameters: Any, peft_helper: PEFTHelper) -> None:
        """From now on patterns are asked by the name of a weight, where the list has that. PEFT's rule.

        ValueError for what is no list of names, or one of too many.
        """
        if not is_list_of_names(parameters):
            raise ValueError(f"target_parameters must be a list of names, got {shown(parameters)}")
        if len(parameters) > MOST_TARGET_PARAMETERS:
            raise ValueError(
                f"target_parameters has {len(parameters)} entries, at most {MOST_TARGET_PARAMETERS} are read"
            )
        targets = frozenset(parameters)

        def pattern_name(module_name: str) -> str:
            weight = f"{module_name}.weight"
            return weight if _is_target(weight, targets) else module_name

        peft_helper.pattern_name = pattern_name

    def check_config(self, parameters: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig) -> list[str]:
        """What is wrong with a config that adapts parameters of other kinds."""
        if not (others := [name for name in parameters if name.rpartition(".")[2] not in ENDS]):
            return []
        return [
            f"target_parameters {others!r} are not supported, only gate_up_proj and down_proj of experts, and "
            "weights of linears."
        ]

    def read_tensor(
        self, name: str, tensor: torch.Tensor, peft_helper: PEFTHelper
    ) -> tuple[str, None, torch.Tensor]:
        """A tensor of all experts, named by its parameter, with the experts as a dimension of its own.

            ...experts.base_layer.lora_A.weight (E * r, H)   ->   ...experts.gate_up_proj.lora_A.weight (E, r, H)
            ...experts.lora_B.weight (H, E * r)              ->   ...experts.down_proj.lora_B.weight (E, H, r)

        r is the config's for the parameter. Whether E is the model's number of experts only the model can tell.

        Raises ValueError naming the tensor: for a parameter that `target_parameters` does not have, for a shape that is
        not that of experts of rank r, and for a tensor that has such a name already.
        """
        if _UNFOLDED.fullmatch(name):
            raise ValueError(
                f"{name} is unsupported LoRA weight: adapters of all experts are read as PEFT saves them"
            )
        if not (match := _FOLDED.fullmatch(name)):  # such as of shared_experts
            return name, None, tensor
        experts, nesting, end, side = match.groups()
        parameter = _parameter(experts.removeprefix(PEFT_PREFIX), nesting.count("."), peft_helper, name)
        tensor = _unfold(tensor, side == "A", rank_of(peft_helper, parameter), name)
        return f"{experts}.{parameter.rpartition('.')[2]}{end}", None, tensor


def _is_target(name: str, targets: frozenset[str]) -> bool:
    """Whether the list has a parameter's name or an end of it. PEFT's rule, which is not that of patterns."""
    parts = name.split(".")
    return not targets.isdisjoint(".".join(parts[i:]) for i in range(len(parts)))


def _parameter(experts: str, depth: int, peft_helper: PEFTHelper, name: str) -> str:
    """The parameter that the wrapper at this depth adapts; the outermost, at depth 0, is the last one's."""
    targets = frozenset(peft_helper.config.get(ExpertAdapters.config_field) or ())
    adapted = [p for p in PARAMETERS if _is_target(f"{experts}.{p}", targets)]
    if depth >= len(adapted):
        raise ValueError(
            f"{name} adapts a parameter of all experts, but of {experts} target_parameters in adapter_config.json has "
            f"{'only ' + ' and '.join(adapted) if adapted else 'none'}"
        )
    return f"{experts}.{adapted[-1 - depth]}"


def rank_of(peft_helper: PEFTHelper, parameter: str) -> int:
    """The rank that the config gives a parameter: the first in `rank_pattern` that matches, else r."""
    ranks = peft_helper.rank_pattern.items()
    return next((rank for key, rank in ranks if peft_helper._matches(key, parameter)), peft_helper.r)


def _unfold(tensor: torch.Tensor, is_lora_a: bool, rank: int, name: str) -> torch.Tensor:
    """(E * r, K) -> (E, r, K), or (N, E * r) -> (E, N, r)"""
    if tensor.ndim != 2 or not tensor.numel() or tensor.shape[0 if is_lora_a else 1] % rank:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected {'rows' if is_lora_a else 'columns'} for experts of "
            f"rank {rank} each"
        )
    check_tensor(name, tensor, None)
    if is_lora_a:
        return tensor.unflatten(0, (-1, rank))
    return tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
