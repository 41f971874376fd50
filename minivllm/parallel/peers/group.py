"""Processes whose GPUs sum by writing into each other's memory. Stands for
vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

A step of decodes sums a few hundred kilobytes twice a layer. What NCCL takes for these is latency, not bytes.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minivllm.parallel.peers.memory import CudaIpc, PeerMemory
from minivllm.parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    from minivllm.gpu.kernels.update import Update

logger = logging.getLogger(__name__)

T = TypeVar("T")

# With so many ranks, so many bytes: everybody gets all parts, so larger ones are NCCL's. vLLM's limits, and for two
# ranks 128 rows of an 8B model.
MOST_BYTES = {2: 1 << 20, 3: 1 << 19, 4: 1 << 19, 5: 1 << 18, 6: 1 << 18, 7: 1 << 18, 8: 1 << 18}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What has not come within these will not; then NCCL sums everything.
SECONDS_TO_TRY = 20.0


class PeerGroup(ProcessGroup):
    """As `ProcessGroup`, but a small sum or gather is one kernel, where memory can be shared and they come out right.

    Such a sum is one kernel with what adapters add to it and the norm of a residual that it is added to.

    memory   that ranks share
    is_on    whether any is taken so, alike on all ranks
    refusal  why not
    """

    def __init__(self, memory: PeerMemory, device: torch.device | str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.most = MOST_BYTES.get(self.size, 0)
        self.refusal = "" if self.most else f"{self.size} are too many"
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.is_on = self.most > 0 and self._share(memory) and self._try(self._compare) is not None
        weakref.finalize(self, memory.close).atexit = False  # a process that ends gives it back anyway
        if not self.is_on and self.rank == 0:
            logger.warning("GPUs do not sum in each other's memory (%s): NCCL does", self.refusal)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x.contiguous()) if self._takes(x) else super().all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._gather(x.contiguous()) if self._takes(x) else super().all_gather(x)

    def look_up_own(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """As there, in five launches instead of seventeen: no tokens are added to the base model's."""
        rows = ids - self.part(len(table)).start
        own = rows.clamp(0, len(table) - 1)
        return F.embedding(own, table).masked_fill_((rows != own)[:, None], 0)

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
        """As `add_and_norm`, what adapters add included.   update, slots: as `peer_norm` takes them"""
        return self._norm(x, residual, weight, eps, update, slots) if self._takes_rows(x) else None

    def release(self) -> None:
        """Have nobody wait for a rank that has ended: sums go on, to no end. No call of CUDA, which might wait."""
        self._stop.fill_(1)

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether it is of floats and small enough, and threads can read 16 bytes at once."""
        return self.is_on and x.dtype in DTYPES and 0 < x.nbytes <= self.most and x.nbytes % 16 == 0

    def _takes_rows(self, x: torch.Tensor) -> bool:
        """Whether there are programs for so many rows, and buffers for such a width."""
        from minivllm.parallel.peers.exchange import BYTES_OF_X

        if not self._takes(x) or x.dim() != 2:
            return False
        nbytes = x.shape[1] * x.itemsize
        return len(x) <= len(self._exchange.turns) and nbytes <= BYTES_OF_X.value and nbytes % 16 == 0

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        from minivllm.parallel.peers.sum_op import peer_sum

        return peer_sum(x, self._exchange)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        from minivllm.parallel.peers.gather_op import peer_gather

        return peer_gather(x, self._exchange)

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        update: "Update | None" = None,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from minivllm.parallel.peers.norm_op import peer_norm

        return peer_norm(x, residual, weight, eps, self._exchange, update, slots)

    # ---- how it begins --------------------------------------------------------------------------------------

    def _try(self, call: Callable[[], T]) -> list[T] | None:
        """What the call gives on each rank; None if it raises on any: all go on, or none."""
        found, problem = None, ""
        try:
            found = call()
        except Exception as error:  # drivers, containers and links have many ways of not sharing memory
            problem = f"rank {self.rank}: {error}"
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, (found, problem))
        self.refusal = "; ".join(problem for _, problem in results if problem)
        return None if self.refusal else [found for found, _ in results]

    def _share(self, memory: PeerMemory) -> bool:
        """Have buffers, and find what others have."""
        from minivllm.parallel.peers.exchange import Exchange, bytes_of_buffers  # Triton is nowhere on a CPU
        from minivllm.parallel.peers.sum_op import programs_of

        programs = programs_of(self.most)
        offers = self._try(lambda: memory.offer(bytes_of_buffers(programs, self.size)))
        opened = offers and self._try(lambda: memory.open(offers))
        if not opened:
            return False
        buffers = torch.tensor(opened[self.rank], device=self.device)
        turns = torch.zeros(programs, dtype=torch.int32, device=self.device)
        self._exchange = Exchange(buffers, turns, self._stop, self.rank)
        return True

    def _compare(self) -> None:
        """RuntimeError unless sums, gathers and norms of random numbers are those of the other way."""
        from minivllm.parallel.peers.exchange import BYTES_OF_X

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
            for rows in (1, len(self._exchange.turns)):
                width = min(self.most // rows, BYTES_OF_X.value) // dtype.itemsize
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


def make_peer_group(device: str) -> PeerGroup:
    """The ranks of this host, each with a GPU."""
    return PeerGroup(CudaIpc(dist.get_rank()), device)
