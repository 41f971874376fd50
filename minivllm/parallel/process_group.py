"""Processes that share a model by torch.distributed. Stands for vllm/distributed/parallel_state.py (v0.22.1)."""

import torch
import torch.distributed as dist

from minivllm.parallel.tensor_parallel import TensorParallel

# The name that PyTorch 2.13 has for it, and warns of the other.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup(TensorParallel):
    """A process of a group of torch.distributed: gloo on CPUs, NCCL on GPUs. vLLM: `GroupCoordinator`.

    Every process must make the same calls in the same order, or all wait.

    group   None = all processes there are; torch.distributed is initialised already
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        _gather(gathered.flatten(0, 1), x.contiguous(), group=self.group)
        return gathered.movedim(0, -2).flatten(-2)  # (..., size * n)

    def least(self, number: int) -> int:
        least = torch.tensor(number)  # on the host: gloo compares it, whatever the model is on
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def broadcast(self, x: torch.Tensor) -> None:
        """Put what rank 0 has there into a contiguous tensor of every process."""
        dist.broadcast(x, 0, self.group)

    def release(self) -> None:
        """Have nobody wait in a kernel for a rank that has ended. torch.distributed has no such kernels."""
