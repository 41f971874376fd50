"""Ranks without processes: the words that others bring are there before a kernel looks for them."""

import torch
from gpu import DEVICE

from minivllm.distributed.words_op import ROWS, WORDS, Words


class Brought:
    """What each rank has before a meeting of all.

    x     (ranks, T, H) float32 or float16
    met   (T,) int32 to how many meetings each row has come before, None = to none
    stop  1 = who waits for what has not come is let go, and has wrong numbers: no test hangs
    """

    def __init__(self, x: torch.Tensor, met: torch.Tensor | None = None, stop: int = 1) -> None:
        self.size, self.rows = x.shape[:2]
        self.x = x.to(DEVICE)
        shape = self.size, 2, self.size, ROWS.value, WORDS.value  # receiver, half, sender
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
        for sender, x in enumerate(self.x):
            if sender != rank:
                self._bring(rank, sender, x)

    def _bring(self, rank: int, sender: int, values: torch.Tensor, begin: int = 0) -> None:
        counts = self.counts[rank, : self.rows] + 1
        words = words_of(values, counts)
        for row, half in enumerate((counts & 1).tolist()):
            self.rooms[rank, half, sender, row, begin : begin + words.shape[1]] = words[row]

    def words_at(self, rank: int) -> Words:
        addresses = torch.tensor([room.data_ptr() for room in self.rooms], device=DEVICE)
        return Words(addresses, self.counts[rank], self.ended[rank], self.stop, rank)

    def reach(self, rank: int, words: int) -> list[torch.Tensor]:
        """Where that rank may read, and where it may write: so many words of each row."""
        others = [other for other in range(self.size) if other != rank]
        pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
        places = [
            self.rooms[receiver, half, sender, : self.rows] for receiver, sender in pairs for half in (0, 1)
        ]
        return [place[:, :words] for place in places]


def words_of(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(T, n) of 2 or 4 bytes, (T,) -> (T, words) int64: the data in the low half of a word, a row's count in the other"""
    data = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return (counts.long()[:, None] << 32) | data
