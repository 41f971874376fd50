"""Which adapter, and so which slot, every row of a step has.

Stands for vllm/lora/layers/utils.py and vllm/lora/punica_wrapper/utils.py (v0.22.1).
"""

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
    slot_of_id = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
    slot_of_id[0] = -1
    if missing := sorted(set(ids) - slot_of_id.keys()):
        raise ValueError(f"adapters {missing} are in the batch but in no slot; slots hold {lora_index_to_id}")
    return [slot_of_id[adapter] for adapter in ids]


# endregion


# region lab 3.4: runs of rows with the same slot
def compute_runs(token_slots: list[int]) -> list[tuple[int, slice]]:
    """(slot, rows) of every run of neighbouring rows that share an adapter, in their order; base rows are in none.

    token_slots: (T,) slot of each row, -1 = base

    A run is as long as it can be: `[2, 2, -1, 2]` has two, `(2, slice(0, 2))` and `(2, slice(3, 4))`.
    """
    runs: list[tuple[int, slice]] = []
    start = 0
    for row in range(1, len(token_slots) + 1):
        if row == len(token_slots) or token_slots[row] != token_slots[start]:
            if token_slots[start] >= 0:
                runs.append((token_slots[start], slice(start, row)))
            start = row
    return runs


# endregion
