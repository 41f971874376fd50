"""The adapters of a layer's experts, packed. Stands for `pack_moe` of vllm/lora/lora_weights.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Sequence
from copy import copy

import minivllm.lora.seams as seams
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights


# region lab 1.7: pack the experts of a layer
def pack_moe(
    loras: Sequence[LoRALayerWeights | None], module_name: str, is_non_gated_moe: bool = False
) -> PackedLoRALayerWeights:
    """Stack what the E experts of a layer have, part by part: A (E, r, K) and B (E, N, r) of [w1, w2, w3].

    loras             w1, w2, w3 (gate, down, up) of expert 0, then of expert 1, and so on; None for what has no
                      adapter, but not for all
    module_name       of the result
    is_non_gated_moe  experts have no up: the third part, which nobody reads, is the first one's tensors, scaling 1.
                      It is None where the first one is, and an adapter on an up is left out

    A part keeps the scaling that its experts share, for `optimize` to fold in. Where they differ each expert is
    optimized first, and the part's scaling is 1. A part that no expert has is None. `rank` is the largest of all.
    vLLM: `PackedLoRALayerWeights.pack_moe`.

    Raises ValueError, naming the module, for a length that is no multiple of 3, and where nothing has an adapter.
    """
    raise Todo("lab 1.7: pack the experts of a layer")


def _stack_experts(loras: Sequence[LoRALayerWeights | None]) -> LoRALayerWeights | None:
    """One part of all experts in one: A (E, r, K), B (E, N, r), None where no expert has it.

    r is the largest rank of any of them. Past an expert's own rank there are zeros, and so there are for an expert
    that lacks the part. Alpha is the first one's, and so is the scaling, once it is all experts'.
    """
    raise Todo("lab 1.7: pack the experts of a layer")


# endregion

# What trainers and servers call parts of experts, whichever expert's.
EXPERT_PARTS = ("w1", "w2", "w3", "gate_proj", "down_proj", "up_proj", "gate_up_proj")

seams.part_names["experts"] = EXPERT_PARTS
PackedLoRALayerWeights.pack_moe = staticmethod(pack_moe)
