"""What the engine keeps of one adapter, and where its folder is.

Stands for a part of vllm/entrypoints/openai/models/serving.py (v0.22.1), which keeps a LoRARequest.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from minivllm.engine.adapter_traits import AdapterTraits
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.request import LoRARequest


@dataclass(slots=True)
class AdapterEntry:
    """One adapter that requests may name. It is kept while the adapter is not in memory, so it is small.

    owner        what brought it: a request id, or "add_lora"
    folder       where its path led when it was registered or reloaded; a link may lead elsewhere by now
    traits       without its tokenizer, which `AdapterTokenizers` may keep
    names        the first is its name, the others are aliases
    generation   counts reloads: requests of a later one wait until those of earlier ones have finished
    """

    request: LoRARequest
    owner: str
    folder: str
    traits: AdapterTraits
    names: tuple[str, ...] = ()
    generation: int = 0


def at_hand(lora_request: LoRARequest) -> LoRARequest:
    """The request, a hub id replaced by its folder of now: no step waits for a network, or gets a newer version."""
    path = lora_request.lora_path
    if os.path.exists(path) or (folder := get_adapter_absolute_path(path)) == path:
        return lora_request
    return replace(lora_request, lora_path=folder)


def folder_of(lora_request: LoRARequest) -> str:
    """Paths with the same result are the same adapter: the real path of a folder, or the hub id as it is."""
    path = os.path.expanduser(lora_request.lora_path)
    if not os.path.exists(path) or (folder := os.path.realpath(path)) == lora_request.lora_path:
        return lora_request.lora_path  # one string, not two that are equal
    return folder


def registered(
    lora_request: LoRARequest,
    entries: Mapping[int, AdapterEntry],
    by_name: Mapping[str, AdapterEntry],
    leaving: Collection[int],
) -> AdapterEntry | None:
    """The adapter with this id, if there is one. ValueError if it is another one, or on its way out.

    entries, by_name, leaving   as in `AdapterRegistry`
    """
    name, adapter_id = lora_request.lora_name, lora_request.lora_int_id
    other = by_name.get(name)
    if other is not None and (other_id := other.request.lora_int_id) != adapter_id:
        raise ValueError(
            f"adapter name '{name}' belongs to lora_int_id {other_id} ({other.owner}), "
            f"not {adapter_id}; use that id or another name"
        )
    entry = entries.get(adapter_id)
    if entry is None:
        return None
    if adapter_id in leaving:
        raise ValueError(f"adapter '{name}' (id {adapter_id}) is being unloaded; ask again when it is gone")
    if lora_request.load_inplace and lora_request.lora_tensors is not None:
        return entry  # a trainer's next weights
    if lora_request.lora_path != entry.request.lora_path and folder_of(lora_request) != entry.folder:
        raise ValueError(
            f"lora_int_id {adapter_id} belongs to adapter '{entry.request.lora_name}' at "
            f"'{entry.request.lora_path}' ({entry.owner}), not to '{lora_request.lora_path}'; "
            "give every adapter its own id, or remove that one first"
        )
    return entry
