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
    """One adapter that requests may name. It outlives the adapter's stay in memory, so it is small.

    owner        what brought it: a request id, or "add_lora"
    folder       where its path led when it was registered or reloaded: a link may lead elsewhere by now
    traits       but for its tokenizer, which the registry has
    names        everything it was called; the first is its name, the others are aliases
    generation   counts reloads: requests of a later one wait until those of earlier ones have finished
    """

    request: LoRARequest
    owner: str
    folder: str
    traits: AdapterTraits
    names: tuple[str, ...] = ()
    generation: int = 0


def at_hand(lora_request: LoRARequest) -> LoRARequest:
    """A hub id as the folder it stands for now: no step waits for a network, nor brings other weights."""
    path = lora_request.lora_path
    if not looks_like_hub_id(path) or os.path.exists(path):
        return lora_request
    return replace(lora_request, lora_path=get_adapter_absolute_path(path))


def folder_of(lora_request: LoRARequest) -> str:
    """What makes two paths the same adapter; a hub id stays what it is."""
    path = os.path.expanduser(lora_request.lora_path)
    if not os.path.exists(path) or (folder := os.path.realpath(path)) == lora_request.lora_path:
        return lora_request.lora_path  # one string, not two that are equal
    return folder
