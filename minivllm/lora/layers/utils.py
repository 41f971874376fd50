"""Which adapter every row of a batch belongs to. Stands for vllm/lora/layers/utils.py (v0.22.1)."""

from dataclasses import dataclass
from enum import Enum


class LoRAMappingType(Enum):
    """Which part of a model a mapping is for. Here there is one part. vLLM: the same name."""

    LANGUAGE = 1


@dataclass
class LoRAMapping:
    """The adapters of one step's rows, by adapter id; 0 is the base model. vLLM: `LoRAMapping`.

    index_mapping   (T,) one id a token
    prompt_mapping  (P,) one id a sampled row
    """

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False
    type: LoRAMappingType = LoRAMappingType.LANGUAGE

    def __post_init__(self) -> None:
        self.index_mapping = tuple(self.index_mapping)
        self.prompt_mapping = tuple(self.prompt_mapping)
