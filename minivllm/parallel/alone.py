"""A process that has a model to itself. vLLM (v0.22.1) asks everywhere whether the size of the group is 1."""

import torch
import torch.nn.functional as F

from minivllm.parallel.tensor_parallel import TensorParallel


class Alone(TensorParallel):
    """The only process: it has all of every layer."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    look_up = staticmethod(F.embedding)
    look_up_own = staticmethod(F.embedding)

    def own_tokens(self, by_token: torch.Tensor) -> torch.Tensor:
        return by_token

    def look_up_own_in(
        self, ids: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        return tables[slots, ids]

    def gather_tokens(self, logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
        return logits


ALONE = Alone()
