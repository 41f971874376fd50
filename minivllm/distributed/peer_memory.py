"""GPUs of one host that read each other's memory. Stands for vllm/distributed/device_communicators/custom_all_reduce.py
(v0.22.1).

A step of decodes sums a few hundred kilobytes twice a layer. NCCL's protocols take longer for these than the reading.
"""

import logging
import os
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from minivllm.distributed.process_group import ProcessGroup

logger = logging.getLogger(__name__)

# Of larger sums every GPU had better read a part alone, as NCCL does.
MOST_BYTES = int(os.environ.get("MINIVLLM_PEER_BYTES", 1 << 20))
DTYPES = (torch.bfloat16, torch.float32)
# So long a GPU may take for the steps that wait for a rank that has ended.
SECONDS_TO_RELEASE = 4.0


class PeerGroup(ProcessGroup):
    """As `ProcessGroup`, but small sums are taken in one kernel that reads the terms where they are.

    room   where this GPU's terms are read by others; None where they cannot, and NCCL sums all
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.room: torch.Tensor | None = None
        wanted = MOST_BYTES > 0 and dtype in DTYPES
        if not self._all_can(wanted and self._exchange(device, dtype)):
            self.room = None

    def _exchange(self, device: str, dtype: torch.dtype) -> bool:
        try:
            self.room = symmetric_memory.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
            self._peers = symmetric_memory.rendezvous(self.room, dist.group.WORLD)
            self._ones, self._zeros = (torch.full_like(self._pad(self.rank), value) for value in (1, 0))
        except Exception as error:  # drivers, containers and links have many ways of not sharing memory
            logger.warning("GPUs cannot read each other's memory (%s): NCCL sums what they have", error)
            return False
        return True

    def _all_can(self, this_one_can: bool) -> bool:
        able = torch.tensor(int(this_one_can))
        dist.all_reduce(able, dist.ReduceOp.MIN)
        return bool(able)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.room is None or x.dtype != self.room.dtype or x.numel() > self.room.numel() or x.numel() % 8:
            return super().all_reduce(x)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(
            self.room, x.contiguous(), "sum", dist.group.WORLD.group_name
        )

    def _pad(self, rank: int) -> torch.Tensor:
        """Where the GPUs tell a rank that their terms are there: 1 once they are, 0 when that was read."""
        return self._peers.get_signal_pad(rank, dtype=torch.int32)

    def release(self) -> None:
        """Let the sums that wait for a rank that has ended go on, to no end: nobody may read what comes of them.

        Copies need no kernel: none could be loaded while others run.
        """
        if self.room is None:
            return
        until = time.monotonic() + SECONDS_TO_RELEASE
        stream = torch.cuda.Stream(self.room.device)
        with torch.cuda.stream(stream):
            while time.monotonic() < until:
                for rank in range(self.size):
                    told = self._ones if rank == self.rank else self._zeros
                    self._pad(rank).copy_(told, non_blocking=True)
                stream.synchronize()
