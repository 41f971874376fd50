"""Names of adapter tensors and modules. Stands for the name functions of vllm/lora/utils.py (v0.22.1)."""

from minivllm.labs import Todo
import logging
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Protocol

logger = logging.getLogger(__name__)

PEFT_PREFIX = "base_model.model."

# What else may be in an adapter's weights file, by the end of the name, and how it came there.
UNSUPPORTED_WEIGHTS = {
    ".lora_magnitude_vector": "it belongs to DoRA; train without use_dora",
    ".lora_B.bias": "a bias on B, but adapter_config.json says lora_bias=False",
    ".trainable_tokens_delta": "trained tokens; train without trainable_token_indices",
    ".embed_tokens.weight": "a whole embedding; save the adapter with save_embedding_layers=False",
    ".lm_head.weight": "a whole output embedding; save the adapter with save_embedding_layers=False",
    ".bias": "a bias of the base model, which all adapters share; train with bias='none'",
}

# What of a repository on the hub is an adapter's, and what of it the engine cannot do without. Not the base model
# that some put beside it, nor the trainer's checkpoints.
NEEDED_FILES = ["adapter_*", "new_embeddings.*"]
ADAPTER_FILES = [
    *NEEDED_FILES,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]


# To compare two names takes 50 µs, and a model of experts has 70,000.
MOST_COMPARED = 400
LONGEST_COMPARED = 120

# The last part of the name of a layer's experts, and what trainers and servers call their parts, whichever expert's.
EXPERTS = "experts"
EXPERT_PARTS = ("w1", "w2", "w3", "gate_proj", "down_proj", "up_proj", "gate_up_proj")


class WeightsMapper(Protocol):
    """Renames a checkpoint's tensor to the model's. vLLM: `model_executor.models.utils.WeightsMapper`."""

    def _map_name(self, name: str) -> str | None: ...


# region lab 1.2: module and side of an adapter tensor's name
def parse_fine_tuned_lora_name(name: str, weights_mapper: WeightsMapper | None = None) -> tuple[str, bool]:
    """Which module a tensor of an adapter belongs to, and whether it is A.

    `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` -> `("model.layers.0.mlp.up_proj", True)`
    `base_model.model.model.embed_tokens.lora_embedding_B` -> `("model.embed_tokens", False)`

    name             with PEFT's prefix or without it; only what leads the name is the prefix
    weights_mapper   renames what is left without the prefix, where the model's names are not Hugging Face's; None
                     from it means that this name stays

    Raises ValueError, its text `_unsupported(name)`, for a name that is neither A nor B of a module. vLLM: the
    same name.
    """
    raise Todo("lab 1.2: module and side of an adapter tensor's name")


# endregion


def _unsupported(name: str) -> str:
    known = (why for end, why in UNSUPPORTED_WEIGHTS.items() if f".{name}".endswith(end))
    why = next(known, "only lora_A, lora_B, lora_embedding_A and lora_embedding_B are read")
    return f"{name} is unsupported LoRA weight: {why}"


def is_base_embedding_weights(name: str) -> bool:
    """PEFT saves the whole base embedding beside an adapted one; those tensors are not the adapter's."""
    return f".{name}".endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight"))


def is_supported_lora_module(name: str, supported: list[str]) -> bool:
    """Whether a module's name is, or ends in, one of the supported names. vLLM: the same name."""
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in supported)


def dotted_ends(name: str) -> Iterator[str]:
    """The name, and what is left behind each of its dots: `a.b.c`, `b.c`, `c`."""
    while name:
        yield name
        name = name.partition(".")[2]


def is_in_target_modules(
    name: str, target_modules: list[str] | None, packed_mapping: dict[str, list[str]] | None = None
) -> bool:
    """Whether the server's `target_modules` lets this module be wrapped. vLLM: the same name.

    Trainers say `q_proj`, the engine's module is `qkv_proj`: a fused module matches by any of its parts,
    a part by the fused module it belongs to. Experts match by a part that each of them has, too. None lets everything
    pass.
    """
    if target_modules is None:
        return True
    prefix, dot, suffix = name.rpartition(".")
    mapping = packed_mapping or {}
    suffixes = {
        suffix,
        *mapping.get(suffix, []),
        *(fused for fused, parts in mapping.items() if suffix in parts),
        *(EXPERT_PARTS if suffix == EXPERTS else ()),
    }
    names = suffixes | {f"{prefix}{dot}{ending}" for ending in suffixes}
    return not names.isdisjoint(target_modules)


def nearest_names(name: str, known: list[str], count: int = 2) -> list[str]:
    """The known names that look most like `name`, for an error message: of many, those with the same numbers."""
    numbers = re.findall(r"\d+", name[:LONGEST_COMPARED])
    alike = (
        [other for other in known if re.findall(r"\d+", other) == numbers]
        if len(known) > MOST_COMPARED
        else []
    )
    compared = list(dict.fromkeys([*alike, *known]))[:MOST_COMPARED]
    return get_close_matches(name[:LONGEST_COMPARED], compared, n=count, cutoff=0.4)


def get_adapter_absolute_path(lora_path: str) -> str:
    """The local folder that an adapter's path or Hugging Face id stands for. vLLM: the same name.

    An absolute path comes back as it is, whether it exists or not; `~` and relative paths are expanded; what is
    no local path is asked of the hub. If that fails the reason is logged and the path comes back unchanged, so
    that the error that follows names what the user wrote.
    """
    if os.path.isabs(lora_path):
        return lora_path
    if lora_path.startswith("~"):
        return os.path.expanduser(lora_path)
    if os.path.exists(lora_path):
        return os.path.abspath(lora_path)
    if not looks_like_hub_id(lora_path):
        return lora_path

    from huggingface_hub.errors import HTTPError

    try:
        return _from_hub(lora_path)
    # HTTPError: the transport's own, which the hub lets through (a proxy that refuses, a connection cut).
    # OSError: no network, offline without a copy. ValueError: not a hub id, or the answer was not the hub's.
    except (HTTPError, OSError, ValueError) as error:
        logger.warning(
            "'%s' is no local folder, and the Hugging Face hub did not give it: %s",
            lora_path,
            error.__cause__ or error,
        )
        return lora_path


def _from_hub(hub_id: str) -> str:
    """The snapshot's folder in the hub's cache, brought up to date if the hub can be reached."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return huggingface_hub.snapshot_download(repo_id=hub_id, allow_patterns=ADAPTER_FILES)
    except LocalEntryNotFoundError as error:
        # The hub cannot be reached, and the copy lacks something: if only a tokenizer, which others do not fetch.
        try:
            return huggingface_hub.snapshot_download(
                repo_id=hub_id, allow_patterns=NEEDED_FILES, local_files_only=True
            )
        except LocalEntryNotFoundError:
            raise error  # noqa: B904 (its own cause says why)


def looks_like_hub_id(path: str) -> bool:
    """`owner/name`. Where `owner` is a folder here it is a path misspelt: no reason to wait for a network."""
    owner, _, name = path.partition("/")
    return bool(name) and "/" not in name and not owner.startswith(".") and not os.path.isdir(owner)
