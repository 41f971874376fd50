"""Adapters of which processes share out both A and B. Stands for the `*WithShardedLoRA` of vllm/lora/layers (v0.22.1).

S-LoRA, https://arxiv.org/abs/2311.03285. Of a column-parallel linear every process would have all of A, of others
all of B. Here these are shared out, too. No process then has all of h = A · x. So they meet once more for every
linear, over rank-sized rows. So they do for experts (sharded_experts.py). Adapters on the ends of a model have one of
the two whole all the same.
"""

from labs.kit.overlay import Todo
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.backend import Backend
from minivllm.lora.layers.base import BaseLinearLayerWithLoRA
from minivllm.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from minivllm.lora.slots import Slots
from minivllm.options.halved_slots import halve_linear


class _FullySharded(BaseLinearLayerWithLoRA):
    """A wrapped linear with `HalvedSlots`, where processes share it; alone, one has all, and this is the plain one."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.tp = base_layer.tp

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Where `fully_sharded_loras` is on; the plain class takes the layer otherwise. vLLM: the same name."""
        return lora_config.fully_sharded_loras and cls.takes(source_layer, len(packed_modules_list))

    def set_mapping(self, punica_wrapper: Backend) -> None:
        if self.tp.size == 1:
            super().set_mapping(punica_wrapper)
            return
        self.backend = punica_wrapper
        self.slots, self.share = halve_linear(self.slots, self.share, punica_wrapper, self.tp)

    # region lab 11.2: the gather of fully sharded
    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """What the base layer gives, to which adapters add; of a row-parallel layer, both are the process's term.

        Alone, or with no adapter in the step, it is the parent's.   input_: (T, own part of K) -> (T, own part of N)
        """
        raise Todo("lab 11.2: the gather of fully sharded")

    # endregion

    def forward_deferred(self, x: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """Of several ranks all is added here, because no kernel expands halves of slots as it reads y."""
        return self.forward(x) if self.tp.size > 1 else super().forward_deferred(x)

    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add what adapters give for a linear's output, as far as it is this process's."""
        raise NotImplementedError


class _ShardedColumn(_FullySharded):
    """Behind a column-parallel linear each process has some ranks of A, and computes as many of h."""

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)
        if self.tp.size > 1:
            own_ranks = -(-self.max_rank // self.tp.size)
            first = self.tp.rank * own_ranks
            self.share = replace(self.share, ranks=slice(first, first + own_ranks))
            self.slots = Slots([a[:, :, :own_ranks].clone() for a in self.slots.a], self.slots.b)

    # region lab 11.2: the gather of fully sharded
    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """All ranks of h are gathered, and expanded by the process's rows of B.   y: (T, own part of N)"""
        raise Todo("lab 11.2: the gather of fully sharded")

    # endregion


class RowParallelLinearWithShardedLoRA(_FullySharded, RowParallelLinearWithLoRA):
    """Behind a row-parallel linear each process has a term of h and some rows of B. vLLM: the same name."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        if self.tp.size > 1:
            own = self.tp.part_of(self.output_size, f"{base_layer.prefix} outputs")
            self.share = replace(self.share, rows=[[own]], cuts_beside=False)

    # region lab 11.2: the gather of fully sharded
    def _add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Terms of h are summed, and expanded into the process's columns of its term of y.   y: (T, N)"""
        raise Todo("lab 11.2: the gather of fully sharded")

    # endregion


class ColumnParallelLinearWithShardedLoRA(_ShardedColumn, ColumnParallelLinearWithLoRA):
    """vLLM: the same name."""


class MergedColumnParallelLinearWithShardedLoRA(_ShardedColumn, MergedColumnParallelLinearWithLoRA):
    """vLLM: the same name."""


class MergedQKVParallelLinearWithShardedLoRA(_ShardedColumn, MergedQKVParallelLinearWithLoRA):
    """vLLM: the same name."""


class QKVParallelLinearWithShardedLoRA(_ShardedColumn, QKVParallelLinearWithLoRA):
    """vLLM: the same name."""


SHARDED = {
    ColumnParallelLinearWithLoRA: ColumnParallelLinearWithShardedLoRA,
    RowParallelLinearWithLoRA: RowParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithLoRA: MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA: MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA: QKVParallelLinearWithShardedLoRA,
}
