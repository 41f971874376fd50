"""Which part of every layer a process has. Stands for vllm/distributed/parallel_state.py (v0.22.1)."""

import torch


class TensorParallel:
    """One of `size` processes that share every layer of a model; here the only one, who has all of each.

    Layers get it when they are made. They ask it what part is theirs, and have it put parts together. vLLM asks globals
    (`get_tensor_model_parallel_rank`, `tensor_model_parallel_all_reduce`).

    rank   which of them, from 0 on    size   how many there are
    """

    rank = 0
    size = 1

    def share(self, n: int, what: str) -> int:
        """How many of n things each process has; ValueError, naming what they are, unless all have as many."""
        if n % self.size:
            raise ValueError(
                f"{what} {n} cannot be divided by tensor_parallel_size {self.size}; "
                f"pass --tensor-parallel-size {self._largest_divisor(n)}"
            )
        return n // self.size

    def part(self, share: int) -> slice:
        """Which of all things this process has, where each has `share` of them."""
        return slice(self.rank * share, (self.rank + 1) * share)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all processes have. The caller's tensor may change; read only what is returned."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """What all processes have, side by side along the last dimension.   (..., n) -> (..., size * n)"""
        return x

    def _largest_divisor(self, n: int) -> int:
        return max(size for size in range(1, self.size + 1) if n % size == 0)


ALONE = TensorParallel()
