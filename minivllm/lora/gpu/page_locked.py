"""Page-locked memory for adapters. vLLM 0.22.1 asks for it tensor by tensor (`pin_memory`, vllm/lora/lora_model.py)."""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

# Of a piece at most, and parts like the one asked for: small models do not need as much. A larger part has its own.
PIECE_BYTES, PARTS = 256 * 2**20, 16
ALIGNMENT = 256


class PageLockedMemory:
    """Hands out parts of large pieces. While the driver locks a piece, no kernel can be launched, so this is seldom.

    A piece is touched before it is locked, since the driver would take far longer. It is kept for adapters to come. A
    part is free again when no tensor lies in it any more.

    lock     locks memory that it is given, and gives a call that unlocks it
    settle   waits for whatever was being copied from parts that are free now
    """

    def __init__(
        self, lock: Callable[[np.ndarray], Callable[[], object]], settle: Callable[[], object]
    ) -> None:
        self._lock_pages, self._settle = lock, settle
        self._pieces: list[np.ndarray] = []
        self._free: list[tuple[int, int, int]] = []  # (piece, first byte, end), in this order
        self._returned: deque[tuple[int, int, int]] = deque()  # by whichever thread had the last tensor
        self._turn, self._growth = threading.Lock(), threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def take(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8, whose contents are anything. Any thread may call it."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if (place := self._find(wanted)) is None:
            with self._growth:
                place = self._find(wanted) or self._grow(wanted)
        piece, first, end = place
        part = self._pieces[piece][first : first + nbytes]
        weakref.finalize(part, self._returned.append, (piece, first, end)).atexit = False
        return torch.from_numpy(part)

    def _find(self, wanted: int) -> tuple[int, int, int] | None:
        """The smallest free part that is large enough, cut to size; None if there is none."""
        with self._turn:
            self._take_back()
            large = [place for place in self._free if place[2] - place[1] >= wanted]
            smallest = min(large, key=lambda place: place[2] - place[1], default=None)
            return smallest and self._cut_from(smallest, wanted)

    def _grow(self, wanted: int) -> tuple[int, int, int]:
        """A part of one more piece. Others take what is free meanwhile: to touch and lock it takes long."""
        piece = np.empty(max(wanted, min(PIECE_BYTES, PARTS * wanted)), dtype=np.uint8)
        torch.from_numpy(piece).zero_()  # touches it, without the GIL
        weakref.finalize(piece, self._lock_pages(piece)).atexit = False
        with self._turn:
            self._pieces.append(piece)
            self._free.append((len(self._pieces) - 1, 0, piece.nbytes))
            return self._cut_from(self._free[-1], wanted)

    def _take_back(self) -> None:
        """Parts that came free since the last time, joined with those beside them."""
        if not self._returned:
            return
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._settle()
        joined: list[tuple[int, int, int]] = []
        for piece, first, end in sorted([*self._free, *returned]):
            if joined and joined[-1][0] == piece and joined[-1][2] == first:
                first = joined.pop()[1]
            joined.append((piece, first, end))
        self._free = joined

    def _cut_from(self, free: tuple[int, int, int], wanted: int) -> tuple[int, int, int]:
        """The beginning of a free part; the rest of it stays free."""
        (piece, first, end), where = free, self._free.index(free)
        self._free[where : where + 1] = [(piece, first + wanted, end)] if end - first > wanted else []
        return piece, first, first + wanted


def lock_for_gpu(memory: np.ndarray) -> Callable[[], object]:
    """Page-lock memory for copies by a GPU; the call that this gives unlocks it. RuntimeError if the system refuses."""
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if error := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
        raise RuntimeError(
            f"{memory.nbytes:,} bytes for adapters cannot be page-locked (CUDA error {error}); lower max_cpu_loras"
        )
    return lambda: runtime.cudaHostUnregister(address)
