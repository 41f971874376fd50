"""Which adapter, and so which slot, every row of a step has.

Stands for vllm/lora/layers/utils.py and vllm/lora/punica_wrapper/utils.py (v0.22.1).
"""

from labs.kit.overlay import Todo
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
    is_prefill, type   vLLM's; nobody reads them here
    """

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False
    type: LoRAMappingType = LoRAMappingType.LANGUAGE

    def __post_init__(self) -> None:
        self.index_mapping = tuple(self.index_mapping)
        self.prompt_mapping = tuple(self.prompt_mapping)


# region lab 3.1: translate adapter ids to slots
def slots_of(ids: tuple[int, ...], lora_index_to_id: list[int | None]) -> list[int]:
    """Whose weights every row is computed with: its slot, -1 for base rows.

    ids               (T,) adapter ids, 0 = base
    lora_index_to_id  (S,) adapter id in each slot, None = free

    No row may be computed with weights that are not its adapter's. ValueError names every id for which that would be.
    """
    raise Todo("lab 3.1: translate adapter ids to slots")


# endregion


# region lab 3.4: runs of rows with the same slot
def compute_runs(token_slots: list[int]) -> list[tuple[int, slice]]:
    """(slot, rows) of every run of neighbouring rows that share an adapter, in their order; base rows are in none.

    token_slots: (T,) slot of each row, -1 = base

    A run is as long as it can be: `[2, 2, -1, 2]` has two, `(2, slice(0, 2))` and `(2, slice(3, 4))`.
    """
    raise Todo("lab 3.4: runs of rows with the same slot")


# endregion
