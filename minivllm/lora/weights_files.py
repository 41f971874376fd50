"""The weights in an adapter's folder. Stands for `safetensors.safe_open` in vllm/lora/lora_model.py (v0.22.1).

That library maps the file into memory, so that the process is killed if somebody cuts the file short meanwhile. It also
parses a header of 100 MB before anybody can ask for its size. The format: eight bytes with the length of the header,
the header, which is a JSON object, and the tensors.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors.torch import _TYPES as DTYPES  # name in the format -> torch's type

from minivllm.lora.limits import HEADER_BYTES, LONGEST_TENSOR_NAME, MOST_DIMENSIONS, MOST_TENSORS
from minivllm.lora.scattered_reads import Part, read_parts

# PEFT's file names, in the order we prefer them: safetensors cannot run code.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def files_in(lora_dir: str, names: Iterable[str]) -> list[Path]:
    """Those of the names that a folder has as files."""
    return [path for name in names if (path := Path(lora_dir, name)).is_file()]


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    if not (found := files_in(lora_dir, WEIGHT_FILES)):
        raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")
    return found[0]


@contextmanager
def reading(path: str | Path) -> Iterator[BinaryIO]:
    """A file of an adapter, open. ValueError names one that cannot be read, or that others cut while it is."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("it is no plain file")
        with os.fdopen(descriptor, "rb") as file:
            yield file
    except EOFError as error:
        raise ValueError(f"'{path}' was cut short while it was read; load the adapter again") from error
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror or error}") from error


class StoredTensor(NamedTuple):
    """One tensor in a file, in the order of rows.

    meta     a tensor of its shape and dtype, without memory
    start    offset of its first byte in the file
    nbytes   from its first byte to its last
    """

    meta: torch.Tensor
    start: int
    nbytes: int


def read_header(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """The header's text, and how many bytes the file has: files with the same are read alike.

    ValueError names a file that is too short for its header, or has one beyond our limits (`limits`).
    """
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    problem = ""
    if size < 8 or length > size - 8:
        problem = f"it has {size} bytes, too few for its header"
    elif length > HEADER_BYTES:
        problem = f"its header has {length} bytes, at most {HEADER_BYTES} are read"
    if problem:
        raise ValueError(f"'{path}' is not a readable safetensors file: {problem}")
    return file.read(length), size


def find_safetensors(
    path: Path, text: bytes, size: int, most_tensors: int = MOST_TENSORS
) -> dict[str, StoredTensor]:
    """Name -> where and what, of every tensor, in the order of names.

    path           for error messages
    text, size     as `read_header` gives them
    most_tensors   a file of more is refused

    ValueError names the file for what the format does not allow, such as tensors that overlap or leave the file. It
    does so for what is beyond our limits (`limits`), too.
    """
    try:
        # Counted before it is parsed: 16 MB of `[` would be a GB of lists.
        for sign, most in (
            (b"{", most_tensors + 2),
            (b"[", 2 * most_tensors),
            (b",", 10 * most_tensors + 100),
        ):
            if (count := text.count(sign)) > most:
                what = "tensors" if sign == b"{" else f"'{sign.decode()}' in its header"
                raise ValueError(f"it has {count} {what}, at most {most} are read")
        header = json.loads(text.decode())
        if not isinstance(header, dict):
            raise ValueError(f"its header is a {type(header).__name__}, not an object")
        header.pop("__metadata__", None)
        end = 8 + len(text)
        found = {name: _stored(name, header[name], end) for name in sorted(header)}
        for start, nbytes, name in sorted((stored.start, stored.nbytes, n) for n, stored in found.items()):
            if start != end:
                raise ValueError(f"{name[:100]} does not begin where the tensor before it ends")
            end += nbytes
        if end != size:
            raise ValueError(f"it has {size} bytes, its header tells of {end}")
    except RecursionError:
        raise ValueError(
            f"'{path}' is not a readable safetensors file: its header is nested too deep"
        ) from None
    except ValueError as error:
        raise ValueError(f"'{path}' is not a readable safetensors file: {error}") from error
    return found


def _stored(name: str, entry: Any, base: int) -> StoredTensor:
    """A tensor by its entry in the header, which ends at `base` in the file."""
    if len(name) > LONGEST_TENSOR_NAME:
        raise ValueError(
            f"a tensor's name has {len(name)} characters, at most {LONGEST_TENSOR_NAME} are read"
        )
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name[:100]} lacks a dtype that torch has, a shape or data_offsets") from error
    numbers = [*shape, start, end] if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS else [None]
    if {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) >= 2**63:
        raise ValueError(f"{name[:100]} has shape or data_offsets that no tensor has")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - start != nbytes:
        raise ValueError(f"{name[:100]} needs {nbytes} bytes and has {end - start}")
    return StoredTensor(torch.empty(shape, dtype=dtype, device="meta"), base + start, nbytes)


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
        stored = find_safetensors(path, *read_header(path, file), most_tensors)
        wanted = {n: tensor for n, tensor in stored.items() if not (is_left_out and is_left_out(n))}
        if shapes_only:
            return {n: tensor.meta for n, tensor in wanted.items()}
        # A's are kept, B's are replaced by scaled ones: what is replaced together lies together.
        parts = {n: Part(t.start, t.nbytes, n.rpartition(".lora_")[2]) for n, t in wanted.items()}
        data = read_parts(file, parts)
        return {n: data[n].view(t.meta.dtype).view(t.meta.shape) for n, t in wanted.items()}
