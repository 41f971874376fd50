"""Processes whose GPUs sum by reading each other's memory. Stands for
vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

A step of decodes sums a few hundred kilobytes twice a layer. What NCCL takes for these is latency, not bytes.
"""

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minivllm.parallel.peers.memory import WAYS, SharedMemory
from minivllm.parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    from minivllm.gpu.kernels.update import Update

logger = logging.getLogger(__name__)

# By which way memory is shared: "ipc" if nothing is said, or "symmetric".
VARIABLE = "MINIVLLM_PEER_SUMS"
# With so many ranks, so many bytes: everybody reads all parts, so larger ones are NCCL's. vLLM's limits, and for two
# ranks 128 rows of an 8B model.
MOST_BYTES = {2: 1 << 20, 3: 1 << 19, 4: 1 << 19, 5: 1 << 18, 6: 1 << 18, 7: 1 << 18, 8: 1 << 18}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What does not meet within these will not; then NCCL sums everything.
SECONDS_TO_TRY = 20.0


class PeerGroup(ProcessGroup):
    """As `ProcessGroup`, but a small sum or gather is one kernel, where memory can be shared and they come out right.

    Such a sum is one kernel with the norm of a residual that it is added to (`add_and_norm`).

    memory   a way to share some
    is_on    whether any is taken so, alike on all ranks
    refusal  why not
    """

    def __init__(self, memory: SharedMemory, device: torch.device | str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.most = MOST_BYTES.get(self.size, 0)
        self.refusal = "" if self.most else f"{self.size} are too many"
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.is_on = self.most > 0 and self._share(memory) and self._is_right()
        weakref.finalize(self, memory.close).atexit = False  # a process that ends gives it back anyway
        if not self.is_on and self.rank == 0:
            logger.warning("GPUs do not sum in each other's memory (%s): NCCL does", self.refusal)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        takes = self._takes(x) and x.dtype in DTYPES
        return self._sum(x.contiguous()) if takes else super().all_reduce(x)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """residual += the sum of all ranks' x, in place; its RMS norm. None: such rows must be summed by `all_reduce`.

        x: (T, H)   residual: (T, H), row stride of any width   weight: (H,) -> (T, H)
        """
        return self._norm(x, residual, weight, eps) if self._takes_rows(x) else None

    def add_adapters_and_norm(
        self,
        update: "Update",
        slots: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor | None:
        """As `add_and_norm`, what adapters add included.   update, slots: as `adapted_peer_norm` takes them"""
        from minivllm.parallel.peers.adapted_norm_op import adapted_peer_norm

        if not self._takes_rows(x):
            return None
        return adapted_peer_norm(update, slots, weight, eps, self._words, x, residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        takes = self._takes(x) and x.shape[-1] * x.itemsize % 4 == 0
        return self._gather(x.contiguous()) if takes else super().all_gather(x)

    def look_up_own(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        from minivllm.parallel.peers.own_rows_op import own_rows

        return own_rows(ids, table, self.part(len(table)))

    def look_up_own_in(
        self, ids: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        from minivllm.parallel.peers.own_rows_op import own_rows

        end = vocabulary + tables.shape[1] - self.tokens(vocabulary)
        return own_rows(
            ids, tables, self.own_part(vocabulary), (vocabulary, end) if self.rank == 0 else (0, 0), slots
        )

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether it is small enough, and threads can read 16 bytes at once."""
        return self.is_on and 0 < x.nbytes <= self.most and x.nbytes % 16 == 0

    def _takes_rows(self, x: torch.Tensor) -> bool:
        """Whether there is room for so many rows of such a width, and threads can read 16 bytes at once."""
        if not self._takes(x) or x.dtype not in DTYPES or x.dim() != 2:
            return False
        nbytes = x.shape[1] * x.itemsize
        return len(x) <= self._rows and nbytes <= self._half // self._rows and nbytes % 16 == 0

    def release(self) -> None:
        """Have nobody wait for a rank that has ended: sums go on, to no end. No call of CUDA, which might wait."""
        self._stop.fill_(1)

    # ---- how it begins --------------------------------------------------------------------------------------

    def _share(self, memory: SharedMemory) -> bool:
        from minivllm.parallel.peers import words_op
        from minivllm.parallel.peers.norm_op import BYTES_A_ROW, ROWS
        from minivllm.parallel.peers.sum_op import programs_of  # Triton is nowhere on a CPU

        programs = programs_of(self.most)
        self._rows = min(programs, ROWS)
        self._half = self._rows * BYTES_A_ROW
        of_sums, of_norms, of_words = 2 * self.most, 2 * self._half, words_op.bytes_of_rooms(self.size)
        flags = of_sums + of_norms + of_words
        offers = self._try(lambda: memory.offer(flags + 4 * programs * self.size))
        opened = offers and self._try(lambda: memory.open(offers), of_all=False)
        if not opened:
            return False
        self._rooms = torch.tensor(opened, device=self.device)
        self._norm_rooms = self._rooms + of_sums
        self._flags = self._rooms + flags
        self._counts = torch.zeros(programs, dtype=torch.int32, device=self.device)
        counts, ended = self._counts.new_zeros(2, words_op.ROWS.value)
        self._words = words_op.Words(self._norm_rooms + of_norms, counts, ended, self._stop, self.rank)
        return True

    def _try(self, call: Any, of_all: bool = True) -> Any:
        """What the call gives on all ranks, or here; None if it raises on any."""
        try:
            found, problem = call(), ""
        except Exception as error:  # drivers, containers and links have many ways of not sharing memory
            found, problem = None, f"rank {self.rank}: {error}"
        results = [None] * self.size
        dist.all_gather_object(results, (found if of_all else None, problem))
        self.refusal = "; ".join(problem for _, problem in results if problem)
        if self.refusal:
            return None
        return [found for found, _ in results] if of_all else found

    def _is_right(self) -> bool:
        """Whether sums, gathers and norms of random numbers are those of the other way, on all ranks."""
        return self._try(self._compare, of_all=False) is not None

    def _compare(self) -> bool:
        from minivllm.parallel.peers.packed_norm_op import MOST_ROWS

        timer = threading.Timer(SECONDS_TO_TRY, self.release)
        timer.start()
        wrong: dict[str, list[str]] = {"sums": [], "gathers": [], "norms": []}
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(self.rank)
            # Two terms have one sum. Of more, the order may be another.
            near = 0.0 if self.size == 2 else self.size * 8 * torch.finfo(dtype).eps
            for nbytes in (16, self.most // 2, self.most):
                n = nbytes // dtype.itemsize
                x = torch.randn(n, generator=generator).to(self.device, dtype)
                found, expected = self._sum(x), super().all_reduce(x.clone())  # x is gathered, too
                error = (found.double() - expected.double()).abs().max().item()
                if not error <= near:
                    wrong["sums"].append(f"{n} numbers of {dtype} differ by {error:.2g}")
                part = x.view(-1, 4)
                if not torch.equal(self._gather(part), super().all_gather(part)):
                    wrong["gathers"].append(f"{n} numbers of {dtype}")
            width = min(self.most, self._half) // self._rows // dtype.itemsize
            for rows in (1, min(self._rows, MOST_ROWS), self._rows):  # by words, and without
                x = torch.randn(rows, width, generator=generator).to(self.device, dtype)
                if not self._norms_right(x, near):
                    wrong["norms"].append(f"{rows} x {width} numbers of {dtype}")
        timer.cancel()
        if not any(wrong.values()) and self._stop.item():
            wrong["sums"].append(f"not done in {SECONDS_TO_TRY:.0f} s")
        if any(wrong.values()):
            raise RuntimeError(
                "; ".join(f"{what} are wrong: {', '.join(w)}" for what, w in wrong.items() if w)
            )
        return True

    def _norms_right(self, x: torch.Tensor, near: float) -> bool:
        """Whether a sum and its norm in one are those of the other way, but for a rounding. `near`: sums may differ."""
        generator = torch.Generator().manual_seed(self.size)  # the same numbers on all ranks
        weight, residual = (torch.rand(n, generator=generator).to(x) + 0.5 for n in (x.shape[1], x.shape))
        found_residual = residual.clone()
        found = self._norm(x, found_residual, weight, 1e-5)
        residual += super().all_reduce(x)
        wide, rounding = residual.double(), 4 * torch.finfo(x.dtype).eps
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        is_right = torch.allclose(found.double(), normed, rounding, 2 * near)
        return is_right and torch.allclose(found_residual, residual, rounding if near else 0.0, near)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        from minivllm.parallel.peers.sum_op import peer_sum

        return peer_sum(x, self._rooms, self._flags, self._counts, self._stop, self.most, self.rank)

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        from minivllm.parallel.peers.norm_op import peer_norm
        from minivllm.parallel.peers.packed_norm_op import packed_norm, packs

        x = x.contiguous()
        if packs(x, self.size):
            return packed_norm(x, residual, weight, eps, self._words)
        tables = self._norm_rooms, self._flags, self._counts, self._stop
        return peer_norm(x, residual, weight, eps, *tables, self._half, self.rank)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        from minivllm.parallel.peers.gather_op import peer_gather

        return peer_gather(x, self._rooms, self._flags, self._counts, self._stop, self.most, self.rank)


def make_peer_group(device: str) -> PeerGroup:
    """The ranks of this host, each with a GPU. ValueError for what is no way to share memory."""
    way = os.environ.get(VARIABLE) or "ipc"
    if way not in WAYS:
        raise ValueError(f"{VARIABLE} {way!r} is no way to share memory; use {' or '.join(WAYS)}")
    return PeerGroup(WAYS[way](dist.get_rank()), device)
