"""Ranks without processes: the words that others bring are there before a kernel looks for them."""

import torch

from minivllm.parallel.peers.words_op import MORE_WORDS, ROWS, WORDS, Words
from tests.tools.device import DEVICE


class Brought:
    """What each rank has before a meeting of all.

    x     (ranks, T, H) float32 or float16
    more  of each rank and row a few float32 numbers: (ranks, T, n), NaN = is not brought
    met   (T,) int32 to how many meetings each row has come before, None = to none
    stop  1 = who waits for what has not come is let go, and has wrong numbers: no test hangs
    """

    def __init__(self, x: torch.Tensor, met: torch.Tensor | None = None, stop: int = 1) -> None:
        self.size, self.rows = x.shape[:2]
        self.x, self.more = x.to(DEVICE), torch.empty(self.size, self.rows, 0, device=DEVICE)
        shape = self.size, 2, self.size, ROWS.value, WORDS.value + MORE_WORDS.value  # receiver, half, sender
        self.rooms = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        met = torch.zeros(self.rows, dtype=torch.int32) if met is None else met
        self.counts = torch.full((self.size, ROWS.value), -5, dtype=torch.int32, device=DEVICE)
        self.counts[:, : self.rows] = met.to(DEVICE)
        self.ended = torch.zeros(self.size, ROWS.value, dtype=torch.int32, device=DEVICE)
        self.stop = torch.full((1,), stop, dtype=torch.int32)
        if DEVICE == "cuda":
            self.stop = self.stop.pin_memory()

    def bring_to(self, rank: int) -> None:
        """What all others bring to the meeting that each row comes to next."""
        counts = self.counts[rank, : self.rows] + 1
        for sender in range(self.size):
            if sender != rank:
                words = self.words_of(sender, counts)
                for row, half in enumerate((counts & 1).tolist()):
                    is_brought = words[row] != 0
                    self.rooms[rank, half, sender, row, is_brought] = words[row, is_brought]

    def words_of(self, sender: int, counts: torch.Tensor) -> torch.Tensor:
        """(T, words of a row) int64, zeros where nothing is brought.   counts: (T,) of each row's meeting"""
        words = self.rooms.new_zeros(self.rows, self.rooms.shape[-1])
        more = in_words(self.more[sender], counts).masked_fill(self.more[sender].isnan(), 0)
        for begin, some in ((0, in_words(self.x[sender], counts)), (WORDS.value, more)):
            words[:, begin : begin + some.shape[1]] = some
        return words

    def words_at(self, rank: int) -> Words:
        addresses = torch.tensor([room.data_ptr() for room in self.rooms], device=DEVICE)
        return Words(addresses, self.counts[rank], self.ended[rank], self.stop, rank)

    def reach(self, rank: int) -> list[torch.Tensor]:
        """Where that rank may read, and where it may write."""
        others = [other for other in range(self.size) if other != rank]
        pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
        width, more = self.x.shape[2] * self.x.itemsize // 4, self.more.shape[2]
        rooms = [self.rooms[to, half, by, : self.rows] for to, by in pairs for half in (0, 1)]
        return [
            *(room[:, :width] for room in rooms),
            *(room[:, WORDS.value : WORDS.value + more] for room in rooms if more),
        ]


def in_words(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(T, n) of 2 or 4 bytes, (T,) -> (T, words) int64: data in the low half of each, the row's count in the other"""
    data = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return (counts.long()[:, None] << 32) | data
