"""What adapters call the experts of a layer. Stands for the experts' half of vllm/lora/model_manager.py (v0.22.1).

Trainers saw a linear for each part of each expert before transformers 5: `mlp.experts.3.gate_proj`, or `experts.3.w1`.
Since then PEFT adapts two parameters of all experts together, `experts.gate_up_proj` and `experts.down_proj` (read by
`target_parameters`). Here all become parts of single experts, named as the model's checkpoints do.
"""

from torch import nn

from minivllm.layers.fused_moe import FusedMoE
from minivllm.lora.layers.base import BaseLayerWithLoRA
from minivllm.lora.lora_weights import LoRALayerWeights

GATE_UP, DOWN = "gate_up_proj", "down_proj"
# Of w1, w2 and w3. An adapter may use either, whichever the model's checkpoints do.
SPELLINGS = (("w1", "w2", "w3"), ("gate_proj", "down_proj", "up_proj"))
OTHER_SPELLING = dict(zip(SPELLINGS[0], SPELLINGS[1])) | dict(zip(SPELLINGS[1], SPELLINGS[0]))


def parts_of_experts(model: nn.Module, name: str, layer: FusedMoE) -> list[str]:
    """Ends of the names of a layer's parts, by expert: `experts.0.w1`, `experts.0.w2`, ..."""
    last = name.rpartition(".")[2]
    parts = [GATE_UP, DOWN] if getattr(model, "is_3d_moe_weight", False) else model.expert_params_mapping
    return [f"{last}.{expert}.{part}" for expert in range(layer.num_experts) for part in parts]


def by_part(found: dict[str, LoRALayerWeights], layer: BaseLayerWithLoRA) -> list[LoRALayerWeights | None]:
    """What an adapter has for a layer's experts, in the order of `targets`.

    Raises ValueError, naming the module: an adapter for all of the layer, which no format has; one part there under two
    names; a fused parameter that does not fit.
    """
    parts: dict[str, LoRALayerWeights] = {}
    for name in sorted(found, key=lambda name: name not in layer.targets):
        for part, own in _parts_of(name, found[name], layer).items():
            if part in parts:
                raise ValueError(f"{part} has two adapters: this one and what {name} has for it")
            parts[part] = own
    return [parts.get(target) for target in layer.targets]


def _parts_of(name: str, weights: LoRALayerWeights, layer: BaseLayerWithLoRA) -> dict[str, LoRALayerWeights]:
    """What an adapter has under a name, by the names of the layer's parts."""
    if name in layer.targets:
        return {name: weights}
    expert, _, last = name.rpartition(".")
    respelt = f"{expert}.{OTHER_SPELLING.get(last)}"
    if respelt in layer.targets:
        return {respelt: weights}
    if last not in (GATE_UP, DOWN):
        raise ValueError(
            f"{name} are several linears here; the adapter must name their parts, such as {next(iter(layer.targets))}"
        )
    return _unfuse(weights, name, layer)


def _unfuse(weights: LoRALayerWeights, fused: str, layer: BaseLayerWithLoRA) -> dict[str, LoRALayerWeights]:
    """The adapter of a fused parameter, A (E, r, K) and B (E, N, r), as one for each part of each expert."""
    slices = range(1, 2) if fused.endswith(f".{DOWN}") else range(0, layer.n_slices, 2)
    names, experts = list(layer.targets), len(layer.targets) // layer.n_slices
    rank, (width, _) = weights.rank, layer.part_shape(slices[0])
    heights = [layer.part_shape(i)[1] for i in slices]
    found = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
    expected = (experts, rank, width), (experts, sum(heights), rank)
    if found != expected:
        raise ValueError(
            f"{fused} has lora_A {found[0]} and lora_B {found[1]}, expected {expected[0]} and {expected[1]}: as many "
            "experts as the layer, each of the config's rank"
        )
    unfused = {}
    for expert, (lora_a, lora_b) in enumerate(zip(weights.lora_a, weights.lora_b)):
        of_expert = [names[layer.n_slices * expert + i] for i in slices]
        whole = LoRALayerWeights(fused, rank, weights.lora_alpha, lora_a, lora_b, weights.scaling)
        unfused.update(zip(of_expert, whole.split(of_expert, heights)))
    return unfused
