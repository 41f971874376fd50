"""Adapters by name alone: who is asked for a name that the engine does not know.

Stands for vllm/lora/resolver.py and vllm/plugins/lora_resolvers/filesystem_resolver.py (v0.22.1).
"""

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Set
from dataclasses import dataclass, field

from minivllm.errors import one_sentence
from minivllm.lora.peft_helper import read_adapter_config
from minivllm.lora.request import LoRARequest
from minivllm.sources.hub import looks_like_hub_id

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
LONGEST_PATH = 4096  # longer than what any file system takes


class LoRAResolver(ABC):
    """Finds an adapter by its name: in a folder, a store, a database. vLLM: `LoRAResolver`."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of that name for that base model, None if there is none here. vLLM: the same name.

        base_model_name   the engine's model, as it was given
        lora_name         what the request calls the adapter: anybody's text, so trust nothing in it

        Whatever it raises ends the request in a ValueError that names the resolver. Nobody else is asked then.
        """


@dataclass
class _LoRAResolverRegistry:
    """Resolvers by name, asked in the order in which they came. vLLM: the same name."""

    resolvers: dict[str, LoRAResolver] = field(default_factory=dict)

    def get_supported_resolvers(self) -> Set[str]:
        """The names of all of them, in their order."""
        return self.resolvers.keys()

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Ask this one too, from now on. One of the same name gives up its place to it, with a warning."""
        if resolver_name in self.resolvers:
            logger.warning(
                "LoRA resolver '%s' was registered before and is replaced by %s", resolver_name, resolver
            )
        self.resolvers[resolver_name] = resolver

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """One of them. KeyError names those that there are."""
        if resolver_name not in self.resolvers:
            known = ", ".join(self.resolvers) or "none"
            raise KeyError(f"LoRA resolver '{resolver_name}' not found; registered: {known}")
        return self.resolvers[resolver_name]


LoRAResolverRegistry = _LoRAResolverRegistry()


class FilesystemResolver(LoRAResolver):
    """The adapters in one folder, each under the name of its own folder. vLLM: `FilesystemResolver`.

    folder             where the adapters lie; `sql` is `folder/sql`, `team/sql` is `folder/team/sql`
    base_model_names   what else the adapters' configs may call the engine's model. vLLM wants the very text that
                       the engine was given, but our engine is given folders, and trainers write hub ids

    A name never leads out of the folder: neither by `..`, nor by an absolute path, nor over a link.
    """

    def __init__(self, folder: str | os.PathLike[str], base_model_names: Collection[str] = ()) -> None:
        self.folder = os.path.realpath(os.path.expanduser(folder))
        self.base_model_names = tuple(base_model_names)
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(f"adapter folder '{folder}' does not exist")

    def find(self, lora_name: str) -> str | None:
        """The folder of the adapter of that name, whatever model it is for; None if there is none."""
        if not is_plain_path(lora_name):
            return None
        try:
            path = os.path.realpath(os.path.join(self.folder, lora_name))
        except ValueError:  # the file system's encoding has no such character
            return None
        inside = path.startswith(os.path.join(self.folder, ""))
        return path if inside and os.path.isfile(os.path.join(path, CONFIG)) else None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """As the base class says. Why an adapter that is there is not given is logged."""
        path = self.find(lora_name)
        if path is None or not self._fits(path, lora_name, base_model_name):
            return None
        return LoRARequest(lora_name, stable_id(lora_name), path)

    def _fits(self, path: str, lora_name: str, base_model_name: str) -> bool:
        """Whether the config is a LoRA's, trained on this model. What cannot be read is refused by the loader,
        which says why."""
        try:
            _, config = read_adapter_config(path)
        except (FileNotFoundError, ValueError):
            return True
        if (kind := config.get("peft_type")) != "LORA":
            logger.warning(
                "%s", one_sentence(f"'{path}' is no answer for '{lora_name}': its peft_type is {kind!r}")
            )
            return False
        trained_on = config.get("base_model_name_or_path")
        if any(_is_same_model(trained_on, name) for name in (base_model_name, *self.base_model_names)):
            return True
        other = f"it was trained on {trained_on!r}, and the engine serves '{base_model_name}'"
        if trained_on and isinstance(trained_on, str):
            other += f"; if both are one model, pass --base-model-name {trained_on}"
        logger.warning("%s", one_sentence(f"'{path}' is no answer for '{lora_name}': {other}"))
        return False


def is_plain_path(lora_name: str) -> bool:
    """Whether a name is one folder below another: `sql`, `team/sql`.

    No other text may name an adapter below a root. With `..`, `.` or empty parts one adapter would have any number of
    names, each with an id, a place in memory and a slot; and `../root/sql` would tell what the root's folder is called.
    """
    if len(lora_name) > LONGEST_PATH or not lora_name.isprintable() or "\\" in lora_name:
        return False
    return not {"", ".", ".."} & set(lora_name.split("/"))


def stable_id(lora_name: str) -> int:
    """An id for an adapter of which only the name is known: the same in every process, as `hash` is not.

    From 2**62 to 2**63 - 1, so that it is none of those that people count from 1.
    """
    digest = hashlib.sha256(lora_name.encode("utf-8", "surrogatepass")).digest()
    return 2**62 + int.from_bytes(digest[:8], "big") % 2**62


def _is_same_model(trained_on: object, served: str) -> bool:
    """The same text or the same folder; or a hub id and the folder that its model lies in."""
    if not isinstance(trained_on, str) or not 0 < len(trained_on) <= LONGEST_PATH or "\0" in trained_on:
        return False
    if os.path.realpath(trained_on) == os.path.realpath(served):
        return True
    return looks_like_hub_id(trained_on) and trained_on.split("/")[1] == _model_name(served)


def _model_name(model: str) -> str:
    """The last part of a path or a hub id; in the hub's cache, `models--owner--name/snapshots/<hash>`, the name."""
    parts = model.rstrip("/").split("/")
    if len(parts) >= 3 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2]
    return parts[-1]
