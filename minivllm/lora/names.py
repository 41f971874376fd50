"""Names of adapter tensors and modules. Stands for the name functions of vllm/lora/utils.py (v0.22.1)."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from minivllm.lora.checks import unsupported

logger = logging.getLogger(__name__)

PEFT_PREFIX = "base_model.model."


class WeightsMapper(Protocol):
    """Renames a checkpoint's tensor to the model's. vLLM: `model_executor.models.utils.WeightsMapper`."""

    def _map_name(self, name: str) -> str | None: ...


# region lab 1.2: module and side of an adapter tensor's name
def parse_fine_tuned_lora_name(name: str, weights_mapper: WeightsMapper | None = None) -> tuple[str, bool]:
    """Which module a tensor of an adapter belongs to, and whether it is A.

    `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` -> `("model.layers.0.mlp.up_proj", True)`
    `base_model.model.model.embed_tokens.lora_embedding_B` -> `("model.embed_tokens", False)`

    name             with PEFT's prefix or without it; inside a name the same words are no prefix
    weights_mapper   renames what follows the prefix, `.lora_A.weight` and all. Where `_map_name` gives None the name
                     stays. None where the model's names are Hugging Face's

    ValueError, its text `unsupported(name)`, for a name that is neither A nor B of a module. vLLM: the same name.
    """
    plain = name.removeprefix(PEFT_PREFIX)
    if weights_mapper:
        plain = weights_mapper._map_name(plain) or plain
    module, _, last = plain.rpartition(".")
    if last == "weight":
        module, _, last = module.rpartition(".")
        sides = {"lora_A": True, "lora_B": False}
    else:
        sides = {"lora_embedding_A": True, "lora_embedding_B": False}
    if last not in sides or not module:
        raise ValueError(unsupported(name))
    return module, sides[last]


# endregion


def is_left_out(name: str, skip_prefixes: list[str] | None = None) -> bool:
    """Whether a tensor is not the adapter's: PEFT's copy of a base embedding, or one under a skipped prefix."""
    if f".{name}".endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
        return True
    return any(f".{prefix}" in f".{name}" for prefix in skip_prefixes or ())


def is_in_target_modules(
    module_name: str,
    target_modules: list[str] | None,
    packed_modules_mapping: dict[str, list[str]] | None = None,
    part_names: Mapping[str, Sequence[str]] = {},
) -> bool:
    """Whether the server's `target_modules` lets this module be wrapped; None lets all. vLLM: the same name.

    Trainers say `q_proj`, the engine's module is `qkv_proj`. So a fused module matches by any of its parts, and a
    part by its fused module.

    part_names   further parts that options know, such as those of each expert (`LoRAExtensions.part_names`)
    """
    if target_modules is None:
        return True
    prefix, dot, suffix = module_name.rpartition(".")
    mapping = packed_modules_mapping or {}
    fused = [whole for whole, parts in mapping.items() if suffix in parts]
    ends = [suffix, *mapping.get(suffix, []), *fused, *part_names.get(suffix, ())]
    names = {*ends, *(f"{prefix}{dot}{end}" for end in ends)}
    return not names.isdisjoint(target_modules)


def find_adapter_folder(lora_path: str, sources: Sequence[Callable[[str], str | None]] = ()) -> str:
    """The local folder that an adapter's path stands for.

    An absolute path comes back as it is, whether it exists or not; `~` and relative paths are expanded. Where there
    is no such path the sources are asked, such as a hub (`LoRAExtensions.folder_sources`). A path that nobody knows
    comes back unchanged, so that the error that follows names what the user wrote.

    FileNotFoundError says why a source cannot give the folder of a path that is its kind of path.
    """
    if os.path.isabs(lora_path):
        return lora_path
    if lora_path.startswith("~"):
        return os.path.expanduser(lora_path)
    if os.path.exists(lora_path):
        return os.path.abspath(lora_path)
    found = (source(lora_path) for source in sources)
    return next((folder for folder in found if folder), lora_path)


def get_adapter_absolute_path(lora_path: str, sources: Sequence[Callable[[str], str | None]] = ()) -> str:
    """As `find_adapter_folder`, but where a source fails the path comes back unchanged, and the reason is logged. vLLM:
    the same name."""
    try:
        return find_adapter_folder(lora_path, sources)
    except FileNotFoundError as error:
        logger.warning("%s", error)
        return lora_path
