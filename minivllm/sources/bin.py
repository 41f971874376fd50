"""Where the tensors of a file of `torch.save` lie. Stands for `torch.load` in vllm/lora/lora_model.py (v0.22.1).

`torch.load(weights_only=True)` runs no code. But a pickle of 60 bytes can ask it for a `bytearray` of a terabyte, and
a compressed archive becomes a thousand times its size. Here nothing that the pickle names is called or made. What comes
out are names, dtypes, shapes and places of tensors, so that a reader knows their size before it reads them.
"""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import torch

from minivllm.lora.limits import LONGEST_TENSOR_NAME, MOST_DIMENSIONS, MOST_TENSORS
from minivllm.lora.safetensors_file import StoredTensor

# A pickle is read operation by operation, with 55 reads for each tensor. An adapter of all linears of Llama 3.1 405B
# has 1,764 tensors. Experts have more: their adapters must be safetensors.
MOST_PICKLED_TENSORS = 4_000
PICKLE_BYTES = 2**20
PICKLE_READS = 250_000

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# All that torch.save writes for a dict of tensors, in its protocol. None of them looks up an attribute.
OPERATIONS = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE, pickle.BINPERSID),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINUNICODE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
)


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


class _View(NamedTuple):
    """A tensor as the pickle has it: a view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def find_pickled(path: Path, file: BinaryIO, most_tensors: int = MOST_TENSORS) -> dict[str, StoredTensor]:
    """Name -> place of every tensor. Of the file no tensor is read.

    path           for error messages
    most_tensors   a file of more is refused

    ValueError names a file that is damaged, holds other things, or is beyond our limits (`limits`).
    """
    advice = "save the adapter as safetensors"
    try:
        stored = _find(file)
    # Damaged bytes can raise anything, and what they raise says nothing to people.
    except Exception as error:
        raise ValueError(f"'{path}' is damaged or holds more than plain tensors; {advice}") from error
    if stored is None:
        raise ValueError(f"'{path}' does not hold a dict of tensors by name; {advice}")
    if len(stored) > most_tensors:
        raise ValueError(f"'{path}' has {len(stored)} tensors, at most {most_tensors} are read")
    for name, tensor in stored.items():
        if tensor is None:
            raise ValueError(f"'{path}': {name} is not a plain tensor; {advice}")
    return stored


def _find(file: BinaryIO) -> dict[str, StoredTensor | None] | None:
    """Name -> place; None for a value that is no plain tensor. None alone if the file holds no dict by names."""
    records = _records(file)
    found = _Reader(_read(file, records["data.pkl"], PICKLE_BYTES)).load()
    if "byteorder" in records and _read(file, records["byteorder"], 10) != b"little":
        raise ValueError("its numbers are not little-endian")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        return None
    if any(len(name) > LONGEST_TENSOR_NAME for name in found):
        raise ValueError(f"a tensor's name has more than {LONGEST_TENSOR_NAME} characters")
    places: dict[str, tuple[int, int]] = {}
    tensors = {name: _place(file, records, view, places) for name, view in found.items()}
    if sum(stored.nbytes for stored in tensors.values() if stored) > _size(file):
        raise ValueError("its tensors share more bytes than the file has")
    return tensors


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _records(file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """The records of the archive by name, without the folder that all are in."""
    _refuse_long_directory(file)
    entries = zipfile.ZipFile(file).infolist()
    if any(entry.compress_type or entry.file_size != entry.compress_size for entry in entries):
        raise ValueError("its records are compressed, which torch.save does not do")
    return {entry.filename.partition("/")[2]: entry for entry in entries}


def _refuse_long_directory(file: BinaryIO) -> None:
    """ValueError for more records than an adapter has: `zipfile` would read all entries of the directory.

    The last 22 bytes of the file say how many there are, in 16 bits. Larger archives (zip64) have 20 bytes before
    these, which say where to find a record of 56 bytes with the number.
    """
    file.seek(-42, io.SEEK_END)
    tail = file.read(42)
    entries, size = struct.unpack("<HI", tail[30:36])
    if tail[:4] == b"PK\6\7":
        file.seek(struct.unpack("<Q", tail[8:16])[0])
        entries, size = struct.unpack("<2Q", file.read(56)[32:48])
    most = MOST_PICKLED_TENSORS + 100
    if tail[20:24] != b"PK\5\6" or entries > most or size > 200 * most:
        raise ValueError(f"it is no archive of torch.save, or one of more than {most} records")


def _read(file: BinaryIO, record: zipfile.ZipInfo, most: int) -> bytes:
    if record.file_size > most:
        raise ValueError(f"{record.filename[:100]} has {record.file_size} bytes, at most {most} are read")
    file.seek(_start(file, record))
    return file.read(record.file_size)


def _start(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: behind a header of 30 bytes, a name and fillers."""
    file.seek(record.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise ValueError("a record is not where the archive says")
    return record.header_offset + 30 + sum(struct.unpack("<2H", header[26:30]))


def _place(
    file: BinaryIO, records: dict[str, zipfile.ZipInfo], view: Any, places: dict[str, tuple[int, int]]
) -> StoredTensor | None:
    """Where a view's bytes are; None for what is no view, or shows one number in several places.

    places   key of a storage -> its start and end in the file; the view's is added
    """
    if not isinstance(view, _View) or len(view.shape) != len(view.stride):
        return None
    numbers = (view.offset, *view.shape, *view.stride)
    if len(view.shape) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        return None
    storage, count, span = view.storage, 1, 1
    in_order = True
    for n, stride in zip(reversed(view.shape), reversed(view.stride)):
        in_order = in_order and (n == 1 or stride == count)
        count, span = count * n, span + (n - 1) * stride
    span = 0 if count == 0 else span
    if span < count:
        return None
    if storage.key not in places:
        record = records[f"data/{storage.key}"]
        start = _start(file, record)
        places[storage.key] = start, start + record.file_size
    begin, end = places[storage.key]
    start, nbytes = begin + view.offset * storage.dtype.itemsize, span * storage.dtype.itemsize
    if nbytes and start + nbytes > min(end, _size(file)):
        raise ValueError("a tensor is larger than its record")
    return StoredTensor(storage.dtype, view.shape, start, nbytes, None if in_order else view.stride)


class _Counted(io.BytesIO):
    """Bytes that can be read PICKLE_READS times. An operation of a pickle reads at least once: so many it may have."""

    left = PICKLE_READS

    def read(self, size: int = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError("its pickle has too many operations")
        return super().read(size)


class _Reader(pickle._Unpickler):
    """The standard library's unpickler in Python, of which a few operations are left.

    The one in C would make a list of 2**32 places for what the pickle says to remember in the last of them.
    """

    dispatch: ClassVar = {operation[0]: pickle._Unpickler.dispatch[operation[0]] for operation in OPERATIONS}

    def __init__(self, data: bytes) -> None:
        super().__init__(_Counted(data))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _view,
            ("torch._utils", "_rebuild_parameter"): _data,
            ("collections", "OrderedDict"): _dict,
        }
        if (module, name) in known:
            return known[module, name]
        if module.partition(".")[0] == "torch":
            return _something_else
        raise ValueError("it names what no tensor needs")

    def persistent_load(self, pid: Any) -> _Storage | None:
        _, dtype, key, _, _ = pid
        return _Storage(dtype, key) if isinstance(dtype, torch.dtype) and type(key) is str else None

    def _set_items(self) -> None:
        """Keys are names and numbers only: to hash a tuple of tuples of tuples may take for ever."""
        items = self.pop_mark()
        self._set(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, items: list) -> None:
        keys, target = items[::2], self.stack[-1]
        if type(target) is not dict or not all(type(key) in (str, int) for key in keys):
            raise ValueError("it has a dict by other things than names")
        target.update(zip(keys, items[1::2]))

    def _skip_state(self) -> None:
        """Attributes of a dict, such as the versions of modules that a state_dict has."""
        self.stack.pop()

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.BUILD[0]] = _skip_state


def _view(storage: _Storage, offset: int, shape: tuple, stride: tuple, *_: Any) -> _View | None:
    """In the place of `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(storage, _Storage) or type(shape) is not tuple or type(stride) is not tuple:
        return None
    return _View(storage, offset, shape, stride)


def _dict(*_: Any) -> dict:
    """In the place of `collections.OrderedDict`, whose items come afterwards."""
    return {}


def _data(data: Any, *_: Any) -> Any:
    """In the place of `torch._utils._rebuild_parameter`."""
    return data


def _something_else(*_: Any) -> None:
    """In the place of all else of torch's: sparse, quantized and meta tensors, sizes, devices."""
