"""What the engine keeps of one adapter, and where its folder is.

Stands for a part of vllm/entrypoints/openai/models/serving.py (v0.22.1), which keeps a LoRARequest.
"""

import os
from dataclasses import dataclass, replace

from minivllm.engine.adapter_traits import AdapterTraits
from minivllm.lora.names import get_adapter_absolute_path, looks_like_hub_id
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
    if not looks_like_hub_id(path) or os.path.exists(path):
        return lora_request
    return replace(lora_request, lora_path=get_adapter_absolute_path(path))


def folder_of(lora_request: LoRARequest) -> str:
    """Paths with the same result are the same adapter: the real path of a folder, or the hub id as it is."""
    path = os.path.expanduser(lora_request.lora_path)
    if not os.path.exists(path) or (folder := os.path.realpath(path)) == lora_request.lora_path:
        return lora_request.lora_path  # one string, not two that are equal
    return folder
