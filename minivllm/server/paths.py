"""Folders that requests name. Stands for nothing in vLLM 0.22.1, which reads any."""

import os

from minivllm.server.errors import ApiError


def below_root(path: str, root: str) -> str:
    """Where an adapter's folder lies, all links followed. vLLM reads any path.

    path   absolute, or from the root on

    ApiError 400 if the folder, or a file in it, lies elsewhere; 404 if there is no such folder.
    """
    root = os.path.realpath(root)
    outside = ApiError(400, f"'{path[:200]}' does not lie below the server's --lora-root", "lora_path")
    try:
        folder = os.path.realpath(os.path.join(root, path))
    except ValueError:  # a null in it, or half a character
        raise outside from None
    if not is_below(folder, root):
        raise outside
    if not os.path.isdir(folder):
        raise ApiError(404, f"there is no adapter folder '{path[:200]}'", "lora_path")
    if not all(is_below(os.path.realpath(entry.path), root) for entry in os.scandir(folder)):
        raise outside
    return folder


def is_below(path: str, root: str) -> bool:
    """Both without links."""
    return path.startswith(os.path.join(root, ""))
