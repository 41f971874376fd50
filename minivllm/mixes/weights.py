"""From the weights of several adapters to those of one. In PEFT `add_weighted_adapter` (peft/tuners/lora/model.py,
0.21.2) with combination_type="cat"."""

from collections.abc import Sequence

import torch

from minivllm.lora.layers.base import BaseLinearLayerWithLoRA, LayerWeights, Parts
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.wrapping import WrappedModules
from minivllm.mixes.request import MixRequest

Weighted = tuple[LoRALayerWeights, float]


class MixSource(AdapterSource):
    """Reads a mix as one adapter, of its parts' folders; all other adapters as they are read without it."""

    def _read_parts(self, lora_request: MixRequest, folder: str, shapes_only: bool) -> LoRAModel:
        if not lora_request.composed:
            raise ValueError(
                "its parts have not been looked up; an engine does that when a request for it arrives"
            )
        wrapped = self.manager.wrapped
        adapters = [self._load(part, shapes_only) for part in lora_request.composed]
        for adapter in adapters:
            refuse_unmixable(adapter, wrapped)
        weights = [weight for _, weight in lora_request.parts]
        return mixed(lora_request.lora_int_id, adapters, weights, wrapped)


def refuse_unmixable(lora: LoRAModel, wrapped: WrappedModules) -> None:
    """ValueError for an adapter that is more than A and B of linears inside the model, or not whole in this process."""
    if lora.beside:
        raise ValueError(f"adapter '{lora.name}' cannot be mixed: it has {', '.join(sorted(lora.beside))}")
    for name, parts in slices_of(lora, wrapped).items():
        if not isinstance(layer := wrapped.modules[name], BaseLinearLayerWithLoRA):
            raise ValueError(
                f"adapter '{lora.name}' cannot be mixed: {name} is no linear inside the model, on which alone "
                "adapters are mixed"
            )
        if beside := sorted({kind for part in parts if part is not None for kind in part.beside}):
            raise ValueError(f"adapter '{lora.name}' cannot be mixed: {name} has {', '.join(beside)}")
        if wrapped.lora_config.fully_sharded_loras and layer.tp_size > 1:
            raise ValueError("mixes are not served with fully_sharded_loras; leave it out")


def slices_of(lora: LoRAModel, wrapped: WrappedModules) -> dict[str, Parts]:
    """Module name -> what an adapter has for each slice, whether it is accepted or only judged."""
    if not lora.is_accepted:
        return wrapped.judge(lora)
    return {name: weights.parts for name, weights in lora.loras.items()}


# region lab 12.5: several adapters as one
def mixed(
    lora_model_id: int, adapters: Sequence[LoRAModel], weights: Sequence[float], wrapped: WrappedModules
) -> LoRAModel:
    """The accepted adapter that adds what they add, each times its weight. Shapes alone (meta) give shapes.

    Some of them may leave a module alone, or a slice of it. ValueError as `joined_ranks` says.
    """
    by_module: dict[str, list[tuple[Parts, float]]] = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        for name, parts in slices_of(adapter, wrapped).items():
            by_module.setdefault(name, []).append((parts, weight))
    loras: dict[str, LayerWeights] = {}
    for name, held in by_module.items():
        most = wrapped.modules[name].max_rank
        by_slice = zip(*([part and (part, weight) for part in parts] for parts, weight in held))
        joined = [joined_ranks(name, [each for each in of_slice if each], most) for of_slice in by_slice]
        rank = max(part.rank for part in joined if part is not None)
        loras[name] = joined[0] if len(joined) == 1 else PackedLoRALayerWeights.from_parts(name, rank, joined)
    lora = LoRAModel(lora_model_id, max(each.rank for each in loras.values()), loras)
    lora.is_accepted = True
    return lora


def joined_ranks(name: str, held: Sequence[Weighted], most: int) -> LoRALayerWeights | None:
    """One pair A, B for a slice, which adds what these pairs add, each times its weight; None where there are none.

    held    parts of a slice, whose B have their scaling already, with their weights
    most    `max_lora_rank`, which the pair's rank may not exceed: ValueError, also for numbers that become infinite
    """
    if not held:
        return None
    ranks = [part.lora_a.shape[0] for part, _ in held]
    if (rank := sum(ranks)) > most:
        raise ValueError(
            f"{name} has ranks {' + '.join(map(str, ranks))} = {rank}, which is greater than max_lora_rank {most}; "
            f"pass --max-lora-rank {rank}"
        )
    lora_a = torch.cat([part.lora_a for part, _ in held])  # (r, K)
    lora_b = torch.cat([part.lora_b * weight for part, weight in held], dim=1)  # (N, r)
    if not lora_b.is_meta and not lora_b.isfinite().all():
        weights = ", ".join(str(weight) for _, weight in held)
        raise ValueError(f"{name} has numbers that weights {weights} make infinite")
    return LoRALayerWeights(held[0][0].module_name, rank, rank, lora_a, lora_b, scaling=1)


# endregion
