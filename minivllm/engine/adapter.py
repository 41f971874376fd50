"""All that the engine keeps of one adapter.

Stands for a part of vllm/entrypoints/openai/models/serving.py (v0.22.1), which keeps a LoRARequest.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from minivllm.lora.request import LoRARequest


class AdapterVersion(NamedTuple):
    """What a load or a reload of an adapter says of it. A reload that fails brings back the last one.

    request   as steps load it: its name, the real folder that its path led to when this was requested, and no
              `load_inplace`
    path      as requested: perhaps a link, which may lead elsewhere or nowhere by now, or a hub id
    found     what options found of the whole adapter (`LoRAModel.beside`); {} for a plain one
    names     by which requests may name it
    """

    request: LoRARequest
    path: str
    found: Mapping[str, Any]
    names: tuple[str, ...] = ()


@dataclass(slots=True)
class Adapter:
    """The record of an adapter that requests may name. It is kept while the adapter is not in memory, so it is small.

    `AdapterRegistry` alone changes it.

    version      what new requests get; one object, so that a change of it is never half done
    owner        what brought it: a request id, or "add_lora"
    generation   of new requests. Each reload that is requested begins one
    reloads      generation -> the reload that begins it, until it is done
    before       generation -> the version before its reload was requested, until weights of that generation, or of a
                 later one, have been read
    failures     generation -> what its reload raised, while requests of it do not know
    was_read     whether it has ever been in memory
    leaving      whether it is being unloaded
    """

    version: AdapterVersion
    owner: str
    generation: int = 0
    reloads: dict[int, LoRARequest] = field(default_factory=dict)
    before: dict[int, AdapterVersion] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    was_read: bool = False
    leaving: bool = False

    request = property(attrgetter("version.request"))
    path = property(attrgetter("version.path"))
    found = property(attrgetter("version.found"))
    names = property(attrgetter("version.names"))

    @property
    def id(self) -> int:
        return self.version.request.lora_int_id

    @property
    def current_generation(self) -> int:
        """The newest one that no reload is to come for: whatever is read now is of its version."""
        return min(self.reloads, default=self.generation + 1) - 1

    def is_elsewhere(self, path: str) -> bool:
        """Whether a request's path leads to another folder than the one that steps read.

        The text decides of a path that leads nowhere: a hub id, or a folder that is gone while the adapter is in
        memory.
        """
        if path == self.request.lora_path:
            return False
        found = inode_of(path)
        return path != self.path if found is None else found != inode_of(self.request.lora_path)


def inode_of(path: str) -> tuple[int, int] | None:
    """What tells a folder from all others on this machine, however it is spelled. None if there is nothing.

    One call of the system, where `real_folder` takes one for each part of the path: each request is compared.
    """
    try:
        found = os.stat(os.path.expanduser(path))
    except (OSError, ValueError):  # ValueError: a text that no path can be
        return None
    return found.st_dev, found.st_ino
