"""From adapter ids to slots. Stands for vllm/lora/punica_wrapper/utils.py (v0.22.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minivllm.lora.layers.utils import LoRAMapping


# region lab 3.1: translate adapter ids to slots
def slots_of(ids: tuple[int, ...], lora_index_to_id: list[int | None]) -> list[int]:
    """The slot of every row; -1 for base rows.

    ids               (T,) adapter ids, 0 = base
    lora_index_to_id  (S,) adapter id in each slot, None = free

    Raises ValueError naming every id that sits in no slot: it would be served by whatever is there instead.
    """
    slot_of_id = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
    slot_of_id[0] = -1
    if missing := sorted(set(ids) - slot_of_id.keys()):
        raise ValueError(f"adapters {missing} are in the batch but in no slot; slots hold {lora_index_to_id}")
    return [slot_of_id[adapter] for adapter in ids]


# endregion


def convert_mapping(
    mapping: LoRAMapping,
    lora_index_to_id: list[int | None],
    max_loras: int,
    vocab_size: int,
    extra_vocab_size: int,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Index tensors of a batch. vLLM: `convert_mapping`.

    max_loras           slots plus one: base rows count as one more slot where indices may not be negative
    vocab_size          of the base model
    extra_vocab_size    tokens that each adapter may add

    Returns
        base_indices            (T,) slot of each token, -1 = base
        sampler_indices         (P,) slot of each sampled row, -1 = base
        sampler_indices_padded  (P,) row + P * slot, base rows counted as slot max_loras - 1
        embeddings_indices      (2, T) offsets into stacked embeddings: of added tokens, of A
        indices_len             the four lengths
    """
    tokens = slots_of(mapping.index_mapping, lora_index_to_id)
    prompts = slots_of(mapping.prompt_mapping, lora_index_to_id)
    base_indices = torch.tensor(tokens, dtype=torch.long, device=device)  # (T,)
    sampler_indices = torch.tensor(prompts, dtype=torch.long, device=device)  # (P,)

    padded = torch.where(sampler_indices < 0, max_loras - 1, sampler_indices)
    rows = torch.arange(len(prompts), device=device)
    sampler_indices_padded = rows + padded * len(prompts)  # (P,)

    embedding_slots = base_indices.clamp(min=0)
    embeddings_indices = torch.stack(
        [embedding_slots * extra_vocab_size, embedding_slots * (vocab_size + extra_vocab_size)]
    )  # (2, T)
    lengths = [len(tokens), len(prompts), len(prompts), len(tokens)]
    return base_indices, sampler_indices, sampler_indices_padded, embeddings_indices, lengths


# region lab 3.4: runs of rows with the same slot
def compute_runs(token_slots: list[int]) -> list[tuple[int, slice]]:
    """(slot, rows) of every run of neighbouring rows that share an adapter, in their order; base rows are in none.

    token_slots: (T,) slot of each row, -1 = base

    A run is as long as it can be: [2, 2, -1, 2] has two, (2, slice(0, 2)) and (2, slice(3, 4)).
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
