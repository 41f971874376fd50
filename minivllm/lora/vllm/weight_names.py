"""vLLM's names on requests, configs, weights and adapters, which the core does without. Stands for parts of vllm/lora/
(v0.22.1).

Importing this puts them on the core's classes.
"""

from operator import attrgetter

from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest


def vllm_lora_scaling_factor(self: PEFTHelper) -> float:
    """The scaling of a module that no pattern names."""
    return self.scaling("", self.r)


def input_dim(self: LoRALayerWeights) -> int:
    return self.lora_a.shape[1]


def output_dim(self: LoRALayerWeights) -> int:
    return self.lora_b.shape[0]


def by_part(name: str) -> property:
    """One field of all parts, None where a part is None."""
    return property(lambda packed: [part and getattr(part, name) for part in packed.parts])


def check_lora_name(self: LoRAModel, lora_name: str) -> bool:
    return lora_name in self.loras


def clone(self: LoRAModel, lora_model_id: int) -> LoRAModel:
    """The same tensors under another id, and a load_id of its own."""
    twin = type(self)(lora_model_id, self.rank, self.loras.copy())
    twin.name, twin.beside, twin.is_accepted = self.name, self.beside.copy(), self.is_accepted
    return twin


for alias, field in (("name", "lora_name"), ("adapter_id", "lora_int_id"), ("path", "lora_path")):
    setattr(LoRARequest, alias, property(attrgetter(field)))
PEFTHelper.vllm_lora_scaling_factor = property(vllm_lora_scaling_factor)
LoRALayerWeights.is_packed, PackedLoRALayerWeights.is_packed = False, True
LoRALayerWeights.input_dim, LoRALayerWeights.output_dim = property(input_dim), property(output_dim)
for plural, field in zip(
    ("lora_alphas", "lora_a", "lora_b", "scaling"), ("lora_alpha", "lora_a", "lora_b", "scaling")
):
    setattr(PackedLoRALayerWeights, plural, by_part(field))
LoRAModel.check_lora_name, LoRAModel.clone = check_lora_name, clone
