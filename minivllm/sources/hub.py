"""Adapters and base models by Hugging Face id.

Stands for the download in `get_adapter_absolute_path` of vllm/lora/utils.py and for a part of
vllm/model_executor/model_loader/ (v0.22.1).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minivllm.progress import SHOW_AFTER_SECONDS, ProgressBar

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


# Of a repository of a base model: not other formats of its weights, nor what lies in folders.
MODEL_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.txt", "chat_template*"]
NOT_MODEL_FILES = ["*/*", "consolidated*"]


def hub_folder(path: str) -> str | None:
    """The local copy of a hub id's adapter; None for what is no id. FileNotFoundError says why the hub fails."""
    if not looks_like_hub_id(path):
        return None
    with hub_errors(f"adapter folder '{path}' does not exist, and the Hugging Face hub did not give it"):
        return _from_hub(path)


def hub_model_folder(model: str) -> str | None:
    """The local copy of a hub id's base model, likewise. A bar shows a download that takes some time."""
    if not looks_like_hub_id(model):
        return None
    import huggingface_hub

    hint = f"`hf download {model} --local-dir FOLDER` on a machine that reaches it makes a folder to serve"
    with hub_errors(f"there is no model folder '{model}', and the Hugging Face hub did not give it ({hint})"):
        return huggingface_hub.snapshot_download(
            model, allow_patterns=MODEL_FILES, ignore_patterns=NOT_MODEL_FILES, tqdm_class=_Bar
        )


class _Bar(ProgressBar):
    """The hub makes one for files and one for bytes, also where all are there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "delay": SHOW_AFTER_SECONDS})


@contextmanager
def hub_errors(what_is_missing: str) -> Iterator[None]:
    """FileNotFoundError, which begins like this, for whatever the hub's client raises."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    # HTTPError: the transport's own, which the hub lets through (a proxy that refuses, a connection cut).
    # OSError: no network, offline without a copy. ValueError: not a hub id, or the answer was not the hub's.
    except (HTTPError, OSError, ValueError) as error:
        raise FileNotFoundError(f"{what_is_missing}: {error.__cause__ or error}") from error


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
