"""Fully sharded adapters: both A and B are cut among the processes (S-LoRA, https://arxiv.org/abs/2311.03285).

Stands for the `*WithShardedLoRA` of vllm/lora/layers (v0.22.1). Plain tensor parallelism leaves each process the whole
A of a column-parallel linear, and the whole B of a row-parallel one. When these are cut, too, no process has all of
h = A · x, so each linear takes one more collective, over rank-sized rows. Experts likewise (sharded_experts.py).
Adapters on the embedding and the head keep one of the two whole.
"""

from dataclasses import replace
from typing import Any

import torch

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase
from minivllm.layers.ranks import Share
from minivllm.lora.backend import Backend
from minivllm.lora.layers.base import LinearArithmetic
from minivllm.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from minivllm.lora.slots import Slots
from minivllm.options.two_step_slots import two_step_linear


class _FullySharded(LinearArithmetic):
    """Of a linear with `TwoStepSlots`, where processes share it; alone, one has all, and this is the plain one."""

    @classmethod
    def is_for(cls, lora_config: LoRAConfig, layer: LinearBase) -> bool:
        """Where `fully_sharded_loras` is on; the plain class takes the layer otherwise."""
        return lora_config.fully_sharded_loras

    def place(self, slots: Slots, share: Share, backend: Backend) -> tuple[Slots, Share]:
        if self.tp.size == 1:
            return super().place(slots, share, backend)
        self.backend = backend
        self.slots, self.share = two_step_linear(slots, share, backend, self.tp)
        return self.slots, self.share

    # region lab 11.2: the gather of fully sharded
    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """What the base layer gives, to which adapters add; of a row-parallel layer, both are the process's term.

        Alone, or with no adapter in the step, it is the parent's.   input_: (T, own part of K) -> (T, own part of N)
        """
        if self.tp.size == 1 or self.backend.no_lora:
            return super().forward(input_)
        y = self.base_layer.forward(input_)[0]
        self._add(y, input_)
        return y, None

    # endregion

    def forward_deferred(self, x: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """Of several ranks all is added here, because no kernel that reads y can wait for the others."""
        return self.forward(x) if self.tp.size > 1 else super().forward_deferred(x)

    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add what adapters give for a linear's output, as far as it is this process's."""
        raise NotImplementedError


class _ShardedColumn(_FullySharded):
    """Behind a column-parallel linear each process has some ranks of A, and computes as many of h."""

    def cut_slots(self, slots: Slots, share: Share, max_rank: int) -> tuple[Slots, Share]:
        if self.tp.size > 1:
            own_ranks = -(-max_rank // self.tp.size)
            first = self.tp.rank * own_ranks
            share = replace(share, ranks=slice(first, first + own_ranks))
            slots = Slots([a[:, :, :own_ranks].clone() for a in slots.a], slots.b)
        return super().cut_slots(slots, share, max_rank)

    # region lab 11.2: the gather of fully sharded
    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """All ranks of h are gathered, and expanded by the process's rows of B.   y: (T, own part of N)"""
        h = self.tp.all_gather(self.slots.shrink(x, self.backend))  # (T, n, R, or a little more)
        rows = self.backend.token_rows(len(x))
        self.slots.expand(y, h[..., : self.max_rank], self.backend, rows)

    # endregion


class _ShardedRow(_FullySharded):
    """Behind a row-parallel linear each process has a term of h and some rows of B."""

    def share_of(self, share: Share) -> Share:
        if self.tp.size == 1:
            return share
        own = self.tp.part_of(self.base_layer.output_size, f"{self.base_layer.prefix} outputs")
        return replace(share, rows=[[own]], cuts_beside=False)

    # region lab 11.2: the gather of fully sharded
    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Terms of h are summed, and expanded into the process's columns of its term of y.   y: (T, N)"""
        h = self.tp.all_reduce(self.slots.shrink(x, self.backend))  # (T, 1, R)
        (own,) = self.share.rows[0]
        self.slots.expand(y[:, own], h, self.backend, self.backend.token_rows(len(x)))

    # endregion


class RowParallelLinearWithShardedLoRA(RowParallelLinearWithLoRA):
    """vLLM: the same name."""

    arithmetic_class = _ShardedRow


class ColumnParallelLinearWithShardedLoRA(ColumnParallelLinearWithLoRA):
    """vLLM: the same name."""

    arithmetic_class = _ShardedColumn


class MergedColumnParallelLinearWithShardedLoRA(MergedColumnParallelLinearWithLoRA):
    """vLLM: the same name."""

    arithmetic_class = _ShardedColumn


class MergedQKVParallelLinearWithShardedLoRA(MergedQKVParallelLinearWithLoRA):
    """vLLM: the same name."""

    arithmetic_class = _ShardedColumn


class QKVParallelLinearWithShardedLoRA(QKVParallelLinearWithLoRA):
    """vLLM: the same name."""

    arithmetic_class = _ShardedColumn


SHARDED = {
    ColumnParallelLinearWithLoRA: ColumnParallelLinearWithShardedLoRA,
    RowParallelLinearWithLoRA: RowParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithLoRA: MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA: MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA: QKVParallelLinearWithShardedLoRA,
}
