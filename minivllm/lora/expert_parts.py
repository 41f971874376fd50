"""What adapters call the experts of a layer. Stands for the experts' half of vllm/lora/model_manager.py (v0.22.1).

Trainers saw a linear for each part of each expert before transformers 5: `mlp.experts.3.gate_proj`, or `experts.3.w1`.
Since then PEFT adapts two parameters of all experts together, `experts.gate_up_proj` and `experts.down_proj` (read by
`target_parameters`). Here all become parts of single experts, named as the model's checkpoints do, and are packed.
"""

from collections.abc import Sequence

from torch import nn

from minivllm.layers.fused_moe import FusedMoE
from minivllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

GATE_UP, DOWN = "gate_up_proj", "down_proj"
# Of w1, w2 and w3. An adapter may use either, whichever the model's checkpoints do.
SPELLINGS = (("w1", "w2", "w3"), ("gate_proj", "down_proj", "up_proj"))
OTHER_SPELLING = dict(zip(SPELLINGS[0], SPELLINGS[1])) | dict(zip(SPELLINGS[1], SPELLINGS[0]))


def process_packed_modules_mapping(model: nn.Module) -> dict[str, list[str]]:
    """The model's fused modules -> names of their parts; of experts `experts.0.w1`, `experts.0.w2`, ... by expert.

    vLLM: the same name, in vllm/lora/utils.py.
    """
    mapping = dict(getattr(model, "packed_modules_mapping", {}))
    for name, layer in model.named_modules():
        if isinstance(layer, FusedMoE):
            last = name.rpartition(".")[2]
            parts = (
                [GATE_UP, DOWN] if getattr(model, "is_3d_moe_weight", False) else model.expert_params_mapping
            )
            mapping[last] = [
                f"{last}.{expert}.{part}" for expert in range(layer.num_experts) for part in parts
            ]
    return mapping


def conform_experts(lora: LoRAModel, name: str, layer: FusedMoEWithLoRA, parts: Sequence[str]) -> None:
    """Give what an adapter has for a layer's experts the names of `parts`, which are in the order of `part_shape`.

    Raises ValueError, naming the module: an adapter for all of the layer, which no format has; one part there under two
    names; a fused parameter that does not fit.
    """
    if (whole := lora.get_lora(name)) is not None and whole.is_packed:
        return
    if whole is not None:
        raise ValueError(
            f"{name} are several linears here; the adapter must name their parts, such as {parts[0]}"
        )
    for fused in (f"{name}.{GATE_UP}", f"{name}.{DOWN}"):
        if (weights := lora.get_lora(fused)) is not None:
            _replace(lora, fused, _unfuse(weights, fused, layer, parts))
    for part in parts:
        expert, _, last = part.rpartition(".")
        respelt = f"{expert}.{OTHER_SPELLING.get(last)}"
        if (weights := lora.get_lora(respelt)) is not None:
            _replace(lora, respelt, {part: weights})


def _replace(lora: LoRAModel, name: str, parts: dict[str, LoRALayerWeights]) -> None:
    """What the adapter has under a name is what it has under these from now on."""
    if there := sorted(lora.loras.keys() & parts.keys()):
        raise ValueError(f"{there[0]} has two adapters: this one and what {name} has for it")
    del lora.loras[name]
    for part, weights in parts.items():
        weights.module_name = part
        lora.loras[part] = weights


def _unfuse(
    weights: LoRALayerWeights, fused: str, layer: FusedMoEWithLoRA, parts: Sequence[str]
) -> dict[str, LoRALayerWeights]:
    """The adapter of a fused parameter, A (E, r, K) and B (E, N, r), as one for each part of each expert."""
    slices = range(1, 2) if fused.endswith(f".{DOWN}") else range(0, layer.n_slices, 2)
    rank, (width, _) = weights.rank, layer.part_shape(slices[0])
    heights = [layer.part_shape(i)[1] for i in slices]
    found = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
    expected = (layer.num_experts, rank, width), (layer.num_experts, sum(heights), rank)
    if found != expected:
        raise ValueError(
            f"{fused} has lora_A {found[0]} and lora_B {found[1]}, expected {expected[0]} and {expected[1]}: as many "
            "experts as the layer, each of the config's rank"
        )
    unfused = {}
    for expert, (lora_a, lora_b) in enumerate(zip(weights.lora_a, weights.lora_b)):
        names = [parts[layer.n_slices * expert + i] for i in slices]
        whole = LoRALayerWeights(fused, rank, weights.lora_alpha, lora_a, lora_b, weights.scaling)
        unfused.update(zip(names, whole.split(names, heights)))
    return unfused


def pack_experts(
    name: str, layer: FusedMoEWithLoRA, loras: Sequence[LoRALayerWeights | None]
) -> PackedLoRALayerWeights:
    """The parts of all experts, in the order of `part_shape`, as slices of the layer: A (E, r, K), B (E, N, r) each."""
    if not isinstance(layer, FusedMoE3DWithLoRA):
        return PackedLoRALayerWeights.pack_moe(loras, name)
    w13, w2 = loras[0::2], loras[1::2]
    packed = PackedLoRALayerWeights.pack_moe([lora for pair in zip(w13, w2) for lora in (*pair, None)], name)
    return PackedLoRALayerWeights.from_parts(name, packed.rank, packed.parts[:2])
