"""Page-locked memory for adapters. vLLM 0.22.1 asks for it tensor by tensor (`pin_memory`, vllm/lora/lora_model.py)."""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

# Of a piece at most, and parts like the one asked for: small models do not need as much. A larger part has its own.
PIECE_BYTES, PARTS = 256 * 2**20, 16
# Parts like the last one that are to be free, at most as many as a piece has: so many adapters are read at a time.
AHEAD = 4
ALIGNMENT = 256

Lock = Callable[[np.ndarray], Callable[[], object]]


class PageLockedMemory:
    """Hands out parts of large pieces. While the driver locks a piece, no kernel can be launched, so this is seldom.

    A piece is touched before it is locked, since the driver would take far longer. It is kept for adapters to come. A
    part is free again when no tensor lies in it any more, and whatever was being copied from it has arrived.

    That takes long, so a thread does it before somebody needs it, once there are two pieces: an engine with few
    adapters locks nothing that it may never use. Others wait for one more piece at most.

    lock     locks memory that it is given, and gives a call that unlocks it; RuntimeError if the system refuses
    settle   waits for whatever was being copied from parts that are free now
    """

    def __init__(self, lock: Lock, settle: Callable[[], object]) -> None:
        self._lock_pages, self._settle = lock, settle
        self._pieces: list[np.ndarray] = []
        self._free: list[tuple[int, int, int]] = []  # (piece, first byte, end), in this order
        self._returned: deque[tuple[int, int, int]] = deque()  # by whichever thread had the last tensor
        # Taking a free part needs `_turn` alone. The other locks are held for long, by a thread that grows or settles.
        self._turn, self._growth, self._settling = threading.Lock(), threading.Lock(), threading.Lock()
        self._was_refused, self._waiting = False, 0

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def take(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8, whose contents are anything. Any thread may call it. RuntimeError if memory is refused."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        piece, first, end = self._find(wanted) or self._wait_or_grow(wanted)
        part = self._pieces[piece][first : first + nbytes]
        weakref.finalize(part, self._returned.append, (piece, first, end)).atexit = False
        if not self._has_enough(wanted):
            self._begin_ahead(wanted)
        return torch.from_numpy(part)

    def _find(self, wanted: int) -> tuple[int, int, int] | None:
        """A free part, cut to size; None if there is none. It waits for copies only if nothing else is left."""
        if (place := self._cut(wanted)) is None:
            self._take_back()
            place = self._cut(wanted)
        return place

    def _cut(self, wanted: int) -> tuple[int, int, int] | None:
        """The beginning of the smallest free part that is large enough; the rest of it stays free."""
        with self._turn:
            large = [place for place in self._free if place[2] - place[1] >= wanted]
            if not large:
                return None
            smallest = min(large, key=lambda place: place[2] - place[1])
            (piece, first, end), where = smallest, self._free.index(smallest)
            self._free[where : where + 1] = [(piece, first + wanted, end)] if end - first > wanted else []
            return piece, first, first + wanted

    def _take_back(self) -> None:
        """Parts that came free since the last time, joined with those beside them."""
        with self._settling:  # the next one finds what this one brings
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            if not returned:
                return
            self._settle()
            with self._turn:
                joined: list[tuple[int, int, int]] = []
                for piece, first, end in sorted([*self._free, *returned]):
                    if joined and joined[-1][0] == piece and joined[-1][2] == first:
                        first = joined.pop()[1]
                    joined.append((piece, first, end))
                self._free = joined

    def _wait_or_grow(self, wanted: int) -> tuple[int, int, int]:
        """A part of the piece that is on its way, if there is one, else of one more."""
        with self._turn:
            self._waiting += 1
        try:
            if place := self._find(wanted):  # the piece came just now
                return place
            with self._growth:
                return self._find(wanted) or self._grow(wanted)
        finally:
            with self._turn:
                self._waiting -= 1

    def _grow(self, wanted: int) -> tuple[int, int, int]:
        """A part of one more piece. Others take what is free meanwhile: to touch and lock it takes long."""
        piece = _locked_piece(max(wanted, min(PIECE_BYTES, PARTS * wanted)), self._lock_pages)
        return self._add(piece, wanted)

    def _add(self, piece: np.ndarray, used: int = 0) -> tuple[int, int, int]:
        """One more piece. Its first bytes are used already: the part that they are."""
        with self._turn:
            number = len(self._pieces)
            self._pieces.append(piece)
            if used < piece.nbytes:
                self._free.append((number, used, piece.nbytes))
            self._was_refused = False
            return number, 0, used

    # ---- ahead ----------------------------------------------------------------------------------------------

    def _has_enough(self, wanted: int) -> bool:
        """Whether there are parts for others like this one, or none are to be made ready before they are needed.

        Pieces of small models are soon there. Where memory was refused, a caller who has to have it gets the error.
        """
        if len(self._pieces) < 2 or PARTS * wanted < PIECE_BYTES or self._was_refused:
            return True
        with self._turn:
            parts = sum((end - first) // wanted for _, first, end in self._free)
        return parts >= min(AHEAD, PIECE_BYTES // wanted)

    def _begin_ahead(self, wanted: int) -> None:
        """Have parts made ready, unless a piece is on its way already. Who finds none meanwhile waits for that.

        Those who wait for a piece that has come take their parts of it first. The last of them comes here, too.
        """
        with self._turn:
            if self._waiting or not self._growth.acquire(blocking=False):
                return
        # The thread ends by itself, and soon. A daemon might be inside the driver while the process is torn down.
        given = weakref.ref(self), self._lock_pages, self._growth, wanted
        try:
            threading.Thread(target=_grow_ahead, args=given, name="minivllm-page-lock").start()
        except RuntimeError:  # no more threads, or the interpreter ends
            self._growth.release()


def _grow_ahead(
    memory: "weakref.ref[PageLockedMemory]", lock_pages: Lock, growth: threading.Lock, wanted: int
) -> None:
    """Take back what came free; one more piece if that is not enough. The memory may be given up meanwhile."""
    try:
        if _lacks(memory, wanted):
            piece = _locked_piece(PIECE_BYTES, lock_pages)
            if (there := memory()) is not None:
                there._add(piece)
    except (RuntimeError, MemoryError):  # nobody needs it yet
        if (there := memory()) is not None:
            there._was_refused = True
    finally:
        growth.release()


def _lacks(memory: "weakref.ref[PageLockedMemory]", wanted: int) -> bool:
    if (there := memory()) is None:
        return False
    there._take_back()
    return not there._has_enough(wanted)


def _locked_piece(nbytes: int, lock_pages: Lock) -> np.ndarray:
    """(nbytes,) uint8, unlocked when it is given up."""
    piece = np.empty(nbytes, dtype=np.uint8)
    piece[:: mmap.PAGESIZE].fill(0)  # touches it: on one core, without the interpreter's lock
    weakref.finalize(piece, lock_pages(piece)).atexit = False
    return piece


def lock_for_gpu(memory: np.ndarray) -> Callable[[], object]:
    """Page-lock memory for copies by a GPU; the call that this gives unlocks it. RuntimeError if the system refuses."""
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if error := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
        raise RuntimeError(
            f"{memory.nbytes:,} bytes for adapters cannot be page-locked (CUDA error {error}); lower max_cpu_loras"
        )
    return lambda: runtime.cudaHostUnregister(address)
