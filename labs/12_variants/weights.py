"""From the weights of several adapters to those of one. In PEFT `add_weighted_adapter` (peft/tuners/lora/model.py,
0.21.2) with combination_type="cat"."""

from labs.kit.overlay import Todo
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

    To use: `slices_of`; `max_rank` of a module in `wrapped.modules`; `PackedLoRALayerWeights.from_parts` for a module
    of several slices; `is_accepted` of a LoRAModel.
    """
    raise Todo("lab 12.5: several adapters as one")


def joined_ranks(name: str, held: Sequence[Weighted], most: int) -> LoRALayerWeights | None:
    """One pair A, B for a slice, which adds what these pairs add, each times its weight; None where there are none.

    held    parts of a slice, whose B have their scaling already, with their weights
    most    `max_lora_rank`, which the pair's rank may not exceed: ValueError, also for numbers that become infinite
    """
    raise Todo("lab 12.5: several adapters as one")


# endregion
