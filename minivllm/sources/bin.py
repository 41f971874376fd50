"""Tensors of a file of `torch.save`. Stands for `torch.load` in vllm/lora/lora_model.py (v0.22.1).

`torch.load(weights_only=True)` runs no code. But a pickle of 60 bytes asks it for a `bytearray` of a terabyte, a key of
tuples in tuples is hashed for years, and a compressed archive becomes a thousand times its size. So the archive's
directory and the operations of its pickle are looked through first: only what `torch.save` writes for plain tensors
comes to `torch.load`. The file is read as a whole, whatever the model needs of it: memory is twice the file.
"""

import io
import os
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch

from minivllm.lora.limits import LONGEST_TENSOR_NAME, MOST_TENSORS

# An adapter of rank 64 on all linears of an 8B model, in float32, has 640 MiB. To read it takes 0.65 s of one core.
MOST_BYTES = 768 * 2**20
# The pickle has 55 operations for each tensor. An adapter of all linears of Llama 3.1 405B has 1,764 tensors. Experts
# have more: their adapters must be safetensors.
MOST_PICKLED_TENSORS = 4_000
PICKLE_BYTES = 2**20
PICKLE_OPERATIONS = 250_000

GLOBALS = {
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict"),
    *(f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short")),
    *("torch CharStorage", "torch ByteStorage", "torch BoolStorage"),
}
# All that torch.save writes for a dict of tensors, in its protocol. None of them looks up an attribute.
OPERATIONS = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BINPERSID", "BUILD"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BINUNICODE", "BINFLOAT", "BININT", "BININT1", "BININT2", "LONG1"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS"),
}


def read_pickled(path: Path, file: BinaryIO, most_tensors: int = MOST_TENSORS) -> dict[str, torch.Tensor]:
    """Name -> tensor, of memory that nobody else has.

    path           for error messages
    most_tensors   a file of more is refused

    ValueError names a file that is too large, is damaged, holds other things, or is beyond our limits (`limits`).
    """
    advice = "save the adapter as safetensors"
    if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
        raise ValueError(f"'{path}' has {size} bytes, and a pickle may have {MOST_BYTES}; {advice}")
    try:
        # What was looked through is what is loaded, whoever writes to the file meanwhile.
        data = io.BytesIO(file.read(MOST_BYTES))
        _refuse_records(data)
        found = torch.load(data, map_location="cpu", weights_only=True)
    # Damaged bytes can raise anything, and what they raise says nothing to people.
    except Exception as error:
        raise ValueError(f"'{path}' is damaged or holds more than plain tensors; {advice}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"'{path}' does not hold a dict of tensors by name; {advice}")
    if len(found) > most_tensors:
        raise ValueError(f"'{path}' has {len(found)} tensors, at most {most_tensors} are read")
    for name, tensor in found.items():
        is_tensor = isinstance(tensor, torch.Tensor) and tensor.nbytes <= size
        if len(name) > LONGEST_TENSOR_NAME or not is_tensor:
            raise ValueError(f"'{path}': {name[:LONGEST_TENSOR_NAME]} is not a plain tensor; {advice}")
    if sum(tensor.nbytes for tensor in found.values()) > size:
        raise ValueError(f"'{path}': its tensors share more bytes than the file has; {advice}")
    return {name: tensor.detach() for name, tensor in found.items()}


def _refuse_records(data: BinaryIO) -> None:
    """ValueError for an archive that torch.save does not write. Two readers of it, this and torch's, see the same."""
    _refuse_long_directory(data)
    with zipfile.ZipFile(data) as archive:
        entries = archive.infolist()
        if any(entry.compress_type or entry.file_size != entry.compress_size for entry in entries):
            raise ValueError("its records are compressed, which torch.save does not do")
        if sum(entry.file_size for entry in entries) > data.seek(0, io.SEEK_END):
            raise ValueError("its records share bytes")
        names = [entry.filename.lower().partition("/") for entry in entries]
        if len({folder for folder, _, _ in names}) != 1 or len({name for _, _, name in names}) < len(names):
            raise ValueError("its records are in several folders, or of one name")
        pickled = next(entry for entry, (_, _, name) in zip(entries, names) if name == "data.pkl")
        if pickled.file_size > PICKLE_BYTES:
            raise ValueError(f"its pickle has {pickled.file_size} bytes, at most {PICKLE_BYTES} are read")
        _refuse_operations(archive.read(pickled))
    data.seek(0)


def _refuse_long_directory(data: BinaryIO) -> None:
    """ValueError for more records than an adapter has: readers of archives read all entries of the directory.

    The last 22 bytes of the file say how many there are, in 16 bits. Larger archives (zip64) have 20 bytes before
    these, which say where to find a record of 56 bytes with the number.
    """
    data.seek(-42, io.SEEK_END)
    tail = data.read(42)
    entries, size = struct.unpack("<HI", tail[30:36])
    if tail[:4] == b"PK\6\7":
        data.seek(struct.unpack("<Q", tail[8:16])[0])
        entries, size = struct.unpack("<2Q", data.read(56)[32:48])
    most = MOST_PICKLED_TENSORS + 100
    if tail[20:24] != b"PK\5\6" or entries > most or size > 200 * most:
        raise ValueError(f"it is no archive of torch.save, or one of more than {most} records")


def _refuse_operations(pickled: bytes) -> None:
    """ValueError for a pickle of anything but tensors by names; nothing that it names is called.

    Of what it remembers only texts and names may come again: a tuple of two of the same tuple, and so on, is hashed
    for ever where it is a key.
    """
    comes_again: set[int] = set()
    before = ""
    for count, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
        name = operation.name
        if count >= PICKLE_OPERATIONS or name not in OPERATIONS:
            raise ValueError("its pickle has operations that no tensor needs, or too many")
        if name == "GLOBAL" and argument not in GLOBALS:
            raise ValueError("its pickle names what no tensor needs")
        if name in ("BINPUT", "LONG_BINPUT") and before in ("BINUNICODE", "GLOBAL"):
            comes_again.add(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            comes_again.discard(argument)
        if name in ("BINGET", "LONG_BINGET") and argument not in comes_again:
            raise ValueError("its pickle uses something twice")
        before = name
