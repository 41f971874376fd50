"""Wrappers that plug in. Stands for what vllm/lora/model_manager.py (v0.22.1) decides by kind of layer."""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.layers.base import BaseLayerWithLoRA


class OptionLayer(BaseLayerWithLoRA):
    """A wrapper of an option (`AdapterOption.wrappers`): it finds its layers in a model itself."""

    @classmethod
    def parts_in(cls, model: nn.Module, name: str, layer: nn.Module) -> list[str] | None:
        """Ends of what adapters call the parts of a model's layer, [] if only the layer has a name; None where the
        layer is not this class's."""
        raise NotImplementedError

    @classmethod
    def around(
        cls, model: nn.Module, name: str, layer: nn.Module, max_loras: int, lora_config: LoRAConfig
    ) -> BaseLayerWithLoRA:
        """What stands in the place of the model's layer (`place_of`), with empty slots."""
        wrapped = cls(layer)
        wrapped.create_lora_weights(max_loras, lora_config)
        return wrapped
