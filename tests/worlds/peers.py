"""Ranks that send numbers into each other's memory, one at a time: what others send a rank is there beforehand."""

from collections.abc import Sequence

import torch

from minivllm.parallel.peers.exchange import BYTES_A_BUFFER, BYTES_OF_X, Exchange, bytes_of_buffers
from minivllm.parallel.peers.sum_op import BYTES_A_PROGRAM
from tests.tools.device import DEVICE
from tests.tools.memory import Guarded


class Peers:
    """What each of some ranks has for so many programs.

    buffers  of each rank (programs, 2, ranks, words) int32, amid numbers that lead far away
    turns    of each rank (programs,)    begun: all of them at the start
    """

    def __init__(self, size: int, programs: int, begun: Sequence[int] | None = None) -> None:
        words = bytes_of_buffers(programs, size) // 4
        nothing = torch.zeros(1, words, dtype=torch.int32)
        self.buffers = [
            Guarded(nothing, 0, DEVICE).view[0].view(programs, 2, size, BYTES_A_BUFFER.value // 4)
            for _ in range(size)
        ]
        turns = torch.tensor([*(begun or [0] * programs)], dtype=torch.int32)[None]
        self.turns = [Guarded(turns, 0, DEVICE).view[0] for _ in range(size)]
        self.stop = torch.zeros(1, dtype=torch.int32)
        if DEVICE == "cuda":
            self.stop = self.stop.pin_memory()

    def exchange_of(self, rank: int) -> Exchange:
        addresses = torch.tensor([buffers.data_ptr() for buffers in self.buffers], device=DEVICE)
        return Exchange(addresses, self.turns[rank], self.stop, rank)

    def post(
        self,
        sender: int,
        receiver: int,
        parts: Sequence[torch.Tensor],
        more: Sequence[torch.Tensor] | None = None,
        ahead: int = 0,
    ) -> None:
        """Put there what the sender's programs send the receiver's in the turn that these have next.

        parts   of each program, 1-D    more   of each, float32, behind these    ahead   so many turns later
        """
        for program, numbers in enumerate(parts):
            half = (int(self.turns[receiver][program]) + ahead) & 1
            buffer = self.buffers[receiver][program, half, sender]
            for sent, begin in (
                (numbers, 0),
                (more[program] if more else numbers[:0], BYTES_OF_X.value // 4),
            ):
                bits = sent.masked_fill(sent == 0, -0.0).contiguous().view(torch.int32)
                buffer[begin : begin + len(bits)] = bits.to(DEVICE)

    def holds(self, other: "Peers") -> bool:
        """Whether all buffers are as another's."""
        return all(map(torch.equal, self.buffers, other.buffers))


def parts_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What each program of a sum or a gather takes."""
    return x.flatten().split(BYTES_A_PROGRAM // x.itemsize)
