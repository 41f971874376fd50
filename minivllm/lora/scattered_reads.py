"""Many parts of a file into memory, by few system calls and into few pieces."""

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

ALIGNMENT = 8  # the widest number
MOST_BUFFERS = os.sysconf("SC_IOV_MAX")  # that one system call fills


class Part(NamedTuple):
    """Bytes of a file.

    start    offset of the first one
    piece    parts of the same piece of memory have the same; it is given up when none of them is used any more
    """

    start: int
    nbytes: int
    piece: Hashable


def read_parts(file: BinaryIO, parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """The bytes of each part: (nbytes,) uint8. EOFError where the file ends too early.

    Parts that follow each other in the file are read by one call. A call gives up the interpreter's lock, and beside
    a busy thread it takes long to have it again. Large pieces come in large pages, which are soon touched.
    """
    sizes: dict[Hashable, int] = defaultdict(int)
    first = {}
    for name, part in parts.items():
        first[name] = sizes[part.piece]
        sizes[part.piece] += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    pieces = {piece: new_memory(nbytes) for piece, nbytes in sizes.items()}
    places = {n: pieces[part.piece][first[n] : first[n] + part.nbytes] for n, part in parts.items()}
    _read_into(file, [(parts[name].start, place.numpy()) for name, place in places.items() if len(place)])
    return places


def read_into(file: BinaryIO, start: int, place: torch.Tensor) -> None:
    """Fill (nbytes,) uint8 from an offset in the file. EOFError where the file ends too early."""
    _read_into(file, [(start, place.numpy())])


def new_memory(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8. Of NumPy, which asks for large pages where PyTorch does not."""
    return torch.from_numpy(np.empty(max(nbytes, 1), dtype=np.uint8))


def _read_into(file: BinaryIO, places: Iterable[tuple[int, np.ndarray]]) -> None:
    """Fill each place from its offset in the file."""
    end, buffers = 0, []
    for start, place in sorted(places, key=lambda each: each[0]):
        if start != end or len(buffers) == MOST_BUFFERS:
            _fill(file, buffers, end)
            buffers = []
        buffers.append(place)
        end = start + len(place)
    _fill(file, buffers, end)


def _fill(file: BinaryIO, buffers: list[np.ndarray], end: int) -> None:
    """Read what ends here in the file."""
    offset = end - sum(map(len, buffers))
    while buffers:
        if not (count := os.preadv(file.fileno(), buffers, offset)):
            raise EOFError
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
