"""The files in an adapter's folder. Stands for the reading in vllm/lora/{peft_helper,lora_model}.py (v0.22.1)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

import minivllm.lora.seams as seams
from minivllm.lora.limits import MOST_TENSORS, open_file, read_config
from minivllm.lora.safetensors_file import StoredTensor, find_safetensors

# PEFT's file names, in the order we prefer them: safetensors cannot run code.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def read_adapter_config(lora_dir: str) -> tuple[str, dict[str, Any]]:
    """Path and fields of a folder's adapter_config.json.

    FileNotFoundError: no such folder, or none in it. ValueError: it is no JSON object.
    """
    if not os.path.isdir(lora_dir):
        raise FileNotFoundError(f"adapter folder '{lora_dir}' does not exist")
    path = os.path.join(lora_dir, "adapter_config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'{lora_dir}' has no adapter_config.json, so it is not an adapter folder")
    try:
        config = read_config(path)
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror or error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"'{path}' holds a {type(config).__name__}, expected a JSON object")
    return path, config


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    for name in WEIGHT_FILES:
        if os.path.isfile(path := os.path.join(lora_dir, name)):
            return Path(path)
    raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")


def files_of_options(lora_dir: str) -> dict[str, Path]:
    """Files that options read, by name (`seams.folder_files`); {} for a plain adapter."""
    paths = {name: Path(lora_dir, name) for name in seams.folder_files}
    return {name: path for name, path in paths.items() if os.path.isfile(path)}


def weights_bytes(lora_dir: str) -> int:
    """Bytes of an adapter's weights and of what options read, as the files' sizes say; 0 without weights."""
    names = (*WEIGHT_FILES, *seams.folder_files)
    paths = (os.path.join(lora_dir, name) for name in names)
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))


def read_weights(
    path: Path,
    shapes_only: bool = False,
    is_left_out: Callable[[str], bool] | None = None,
    most_tensors: int = MOST_TENSORS,
) -> dict[str, torch.Tensor]:
    """All tensors of a weights file, in the order of names.

    shapes_only   tensors on the "meta" device: of the file only names, dtypes and shapes are read
    is_left_out   of which tensors not even the shape is wanted, by their names
    most_tensors  a file of more is refused

    ValueError names a file that cannot be read, is damaged or cut short, would need to run code, or is beyond our
    limits (`limits`). The tensors are copies: what happens to the file afterwards does not change them.
    """
    find = find_safetensors if path.suffix == ".safetensors" else seams.file_formats[path.suffix]
    try:
        with open_file(path) as file:
            stored = find(path, file, most_tensors)
            names = sorted(name for name in stored if not (is_left_out and is_left_out(name)))
            if shapes_only:
                return {name: _empty(stored[name]) for name in names}
            return {name: _read_tensor(path, file, stored[name]) for name in names}
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error


def _empty(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _read_tensor(path: Path, file: BinaryIO, stored: StoredTensor) -> torch.Tensor:
    """One tensor in memory of its own. ValueError where the file ends before it: it was cut since it was judged."""
    data = torch.empty(stored.nbytes, dtype=torch.uint8)
    left, place = memoryview(data.numpy()), stored.start
    while left:
        if not (count := os.preadv(file.fileno(), [left], place)):
            raise ValueError(f"'{path}' was cut short while it was read; load the adapter again")
        left, place = left[count:], place + count
    numbers = data.view(stored.dtype)
    if stored.stride is None:
        return numbers.view(stored.shape)
    return numbers.as_strided(stored.shape, stored.stride)
