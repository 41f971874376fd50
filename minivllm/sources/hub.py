"""Adapters by Hugging Face id. Stands for the download in `get_adapter_absolute_path`, vllm/lora/utils.py (v0.22.1)."""

import os

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


def hub_folder(path: str) -> str | None:
    """The local copy of a hub id's adapter; None for what is no id. FileNotFoundError says why the hub fails."""
    if not looks_like_hub_id(path):
        return None

    from huggingface_hub.errors import HTTPError

    try:
        return _from_hub(path)
    # HTTPError: the transport's own, which the hub lets through (a proxy that refuses, a connection cut).
    # OSError: no network, offline without a copy. ValueError: not a hub id, or the answer was not the hub's.
    except (HTTPError, OSError, ValueError) as error:
        missing = f"adapter folder '{path}' does not exist, and the Hugging Face hub did not give it"
        raise FileNotFoundError(f"{missing}: {error.__cause__ or error}") from error


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
