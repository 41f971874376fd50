"""The files in an adapter's folder. Stands for the reading in vllm/lora/{peft_helper,lora_model}.py (v0.22.1)."""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from minivllm.lora.checks import check_depth, without_duplicates
from minivllm.lora.limits import CONFIG_BYTES, MOST_TENSORS
from minivllm.lora.safetensors_file import StoredTensor, find_safetensors
from minivllm.lora.scattered_reads import Part, read_parts

# PEFT's file names, in the order we prefer them: safetensors cannot run code.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def open_file(path: str | Path) -> BinaryIO:
    """A file to read bytes from. OSError for anything else of that name: opening a pipe would wait for its writer."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"'{path}' is no plain file")
    return os.fdopen(file, "rb")


def read_adapter_config(lora_dir: str) -> tuple[str, dict[str, Any]]:
    """Path and fields of a folder's adapter_config.json.

    FileNotFoundError: no such folder, or no config in it. ValueError names a config that cannot be read or parsed, is
    beyond our limits (`limits`), or is no JSON object.
    """
    if os.path.exists(lora_dir) and not os.path.isdir(lora_dir):
        raise FileNotFoundError(
            f"'{lora_dir}' is a file, and an adapter is a folder; give the folder that has its adapter_config.json"
        )
    if not os.path.isdir(lora_dir):
        raise FileNotFoundError(f"adapter folder '{lora_dir}' does not exist")
    path = os.path.join(lora_dir, "adapter_config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'{lora_dir}' has no adapter_config.json, so it is not an adapter folder")
    try:
        with open_file(path) as file:
            data, nbytes = file.read(CONFIG_BYTES + 1), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror or error}") from error
    if len(data) > CONFIG_BYTES:
        raise ValueError(f"'{path}' has {nbytes} bytes, more than the {CONFIG_BYTES} that a config may have")
    try:
        config = json.loads(data.decode(), object_pairs_hook=without_duplicates)
        check_depth(config)
    # ValueError: not JSON, not UTF-8, an int of 5,000 digits. RecursionError: brackets in brackets in brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"'{path}' holds a {type(config).__name__}, expected a JSON object")
    return path, config


def files_in(lora_dir: str, names: Iterable[str]) -> list[Path]:
    """Those of the names that a folder has as files."""
    return [path for name in names if (path := Path(lora_dir, name)).is_file()]


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    if not (found := files_in(lora_dir, WEIGHT_FILES)):
        raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")
    return found[0]


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """A weights file, open. ValueError names one that cannot be read, or that others cut while it is."""
    try:
        with open_file(path) as file:
            yield file
    except EOFError as error:
        raise ValueError(f"'{path}' was cut short while it was read; load the adapter again") from error
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error


def shapes_of(
    stored: Mapping[str, StoredTensor], is_left_out: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors on the "meta" device, in the order of names."""
    wanted = [n for n in sorted(stored) if not (is_left_out and is_left_out(n))]
    return {n: torch.empty(stored[n].shape, dtype=stored[n].dtype, device="meta") for n in wanted}


def read_weights(
    path: Path,
    shapes_only: bool = False,
    is_left_out: Callable[[str], bool] | None = None,
    most_tensors: int = MOST_TENSORS,
    formats: Mapping[str, Callable[..., dict[str, torch.Tensor]]] = {},
) -> dict[str, torch.Tensor]:
    """All tensors of a weights file, in the order of names.

    shapes_only   tensors on the "meta" device: of the file only names, dtypes and shapes are read
    is_left_out   says by a tensor's name that not even its shape is wanted
    most_tensors  a file of more is refused
    formats       of other files than .safetensors (`LoRAExtensions.file_formats`)

    ValueError names a file that cannot be read, is of a format that nobody reads, is damaged or cut short, or holds
    code. It does so for one beyond our limits (`limits`), too. The tensors are copies: later changes of the file do not
    reach them.
    """
    read = formats.get(path.suffix)
    if read is None and path.suffix != ".safetensors":
        raise ValueError(f"'{path}' is a {path.suffix} file, which is not read here; save it as safetensors")
    with reading(path) as file:
        if read is not None:
            tensors = read(path, file, most_tensors)
            wanted = {n: tensors[n] for n in sorted(tensors) if not (is_left_out and is_left_out(n))}
            return {n: tensor.to("meta") for n, tensor in wanted.items()} if shapes_only else wanted
        stored = find_safetensors(path, file, most_tensors)
        shapes = shapes_of(stored, is_left_out)
        if shapes_only:
            return shapes
        # A's are kept, B's are replaced by scaled ones: what is replaced together lies together.
        parts = {n: Part(stored[n].start, stored[n].nbytes, n.rpartition(".lora_")[2]) for n in shapes}
        data = read_parts(file, parts)
        return {n: data[n].view(shape.dtype).view(shape.shape) for n, shape in shapes.items()}
