"""The files that an adapter's tensors lie in. Stands for the reading in vllm/lora/lora_model.py (v0.22.1)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch

from minivllm.lora.limits import MOST_TENSORS, open_file
from minivllm.lora.pickle_file import find_pickled
from minivllm.lora.safetensors_file import StoredTensor, find_safetensors

# PEFT's file names, in the order we prefer them: safetensors cannot run code.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Embeddings of tokens that an adapter adds: vLLM's name, up to 0.10; PEFT has none for them.
NEW_EMBEDDINGS_FILES = ("new_embeddings.safetensors", "new_embeddings.bin")


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    path = _first_file(lora_dir, WEIGHT_FILES)
    if path is None:
        raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")
    return path


def find_new_embeddings_file(lora_dir: str) -> Path | None:
    """The embeddings of the tokens that the adapter adds, safetensors first; None where it adds none."""
    return _first_file(lora_dir, NEW_EMBEDDINGS_FILES)


def weights_bytes(lora_dir: str) -> int:
    """Bytes of an adapter's weights and new embeddings, as the files' sizes say."""
    paths = _first_file(lora_dir, WEIGHT_FILES), find_new_embeddings_file(lora_dir)
    return sum(path.stat().st_size for path in paths if path)


def _first_file(folder: str, names: tuple[str, ...]) -> Path | None:
    return next((Path(folder, name) for name in names if os.path.isfile(os.path.join(folder, name))), None)


def read_weights(
    path: Path,
    shapes_only: bool = False,
    is_wanted: Callable[[str], bool] = lambda name: True,
    most_tensors: int = MOST_TENSORS,
) -> dict[str, torch.Tensor]:
    """All tensors of a weights file, in the order of names.

    shapes_only   tensors on the "meta" device: of the file only names, dtypes and shapes are read
    is_wanted     whether a tensor is read at all, by its name
    most_tensors  a file of more is refused

    ValueError names a file that cannot be read, is damaged or cut short, would need to run code, or is beyond our
    limits (`limits`). The tensors are copies: what happens to the file afterwards does not change them.
    """
    find = find_safetensors if path.suffix == ".safetensors" else find_pickled
    try:
        with open_file(path) as file:
            stored = find(path, file, most_tensors)
            stored = {name: stored[name] for name in sorted(stored) if is_wanted(name)}
            if shapes_only:
                return {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in stored.items()}
            in_place = sorted(stored, key=lambda name: stored[name].start)
            tensors = {name: _read_tensor(path, file, stored[name]) for name in in_place}
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error
    return {name: tensors[name] for name in stored}


def _read_tensor(path: Path, file: BinaryIO, stored: StoredTensor) -> torch.Tensor:
    """One tensor in memory of its own. ValueError where the file ends before it: it was cut since it was judged."""
    data = torch.empty(stored.nbytes, dtype=torch.uint8)
    left, place = memoryview(data.numpy()), stored.start
    while left:
        if not (count := os.preadv(file.fileno(), [left], place)):
            raise ValueError(f"'{path}' was cut short while it was read; load the adapter again")
        left, place = left[count:], place + count
    numbers = data.view(stored.dtype)
    return (
        numbers.view(stored.shape)
        if stored.stride is None
        else numbers.as_strided(stored.shape, stored.stride)
    )
