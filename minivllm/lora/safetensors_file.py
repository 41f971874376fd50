"""Where the tensors of a safetensors file lie. Stands for `safetensors.safe_open` in vllm/lora/lora_model.py (v0.22.1).

The library maps the file into memory, so that the process is killed if somebody cuts the file short meanwhile. It also
parses a header of 100 MB before anybody can ask for its size. The format: eight bytes with the length of the header,
the header, which is a JSON object, and the tensors.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors.torch import _TYPES as DTYPES  # name in the format -> torch's type

from minivllm.lora.limits import HEADER_BYTES, LONGEST_TENSOR_NAME, MOST_DIMENSIONS, MOST_TENSORS


class StoredTensor(NamedTuple):
    """One tensor in a file, in the order of rows.

    start    offset of its first byte in the file
    nbytes   from its first byte to its last
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def find_safetensors(path: Path, file: BinaryIO, most_tensors: int = MOST_TENSORS) -> dict[str, StoredTensor]:
    """Name -> where and what, of every tensor. Of the file only the header is read.

    path           for error messages
    most_tensors   a file of more is refused

    ValueError names the file for what the format does not allow, such as tensors that overlap or leave the file. It
    does so for what is beyond our limits (`limits`), too.
    """
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    try:
        if size < 8 or length > size - 8:
            raise ValueError(f"it has {size} bytes, too few for its header")
        if length > HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes, at most {HEADER_BYTES} are read")
        header = _parse(file.read(length), most_tensors)
        header.pop("__metadata__", None)
        found = {name: _stored(name, entry, 8 + length) for name, entry in header.items()}
        end = 8 + length
        for start, nbytes, name in sorted((stored.start, stored.nbytes, n) for n, stored in found.items()):
            if start != end:
                raise ValueError(f"{name[:100]} does not begin where the tensor before it ends")
            end += nbytes
        if end != size:
            raise ValueError(f"it has {size} bytes, its header tells of {end}")
    except ValueError as error:
        raise ValueError(f"'{path}' is not a readable safetensors file: {error}") from error
    return found


def header_key(file: BinaryIO) -> tuple[bytes, int]:
    """The same for files whose headers and sizes are the same; they are read alike."""
    length = file.read(8)
    text = file.read(min(int.from_bytes(length, "little"), HEADER_BYTES))
    return hashlib.sha256(length + text).digest(), os.fstat(file.fileno()).st_size


def _parse(text: bytes, most_tensors: int) -> dict[str, Any]:
    """The header's JSON. Brackets and commas are counted first: 16 MB of `[` would be a GB of lists."""
    for sign, most in ((b"{", most_tensors + 2), (b"[", 2 * most_tensors), (b",", 10 * most_tensors + 100)):
        if (count := text.count(sign)) > most:
            what = "tensors" if sign == b"{" else f"'{sign.decode()}' in its header"
            raise ValueError(f"it has {count} {what}, at most {most} are read")
    try:
        header = json.loads(text.decode())
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, not an object")
    return header


def _stored(name: str, entry: Any, base: int) -> StoredTensor:
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
    return StoredTensor(dtype, tuple(shape), base + start, nbytes)
