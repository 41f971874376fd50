"""Who reads a linear's output may add what it lacks. Beside vllm/lora/punica_wrapper/punica_gpu.py, not in vLLM."""

import functools
from collections.abc import Callable

import torch

from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.adapted_norm_tiles_op import adapted_norm_of_tiles
from minivllm.gpu.kernels.adapted_peer_norm_op import adapted_peer_norm
from minivllm.gpu.kernels.adapted_rotary_op import adapted_rotary
from minivllm.gpu.kernels.adapted_silu_op import adapted_silu
from minivllm.gpu.kernels.paged_tuning import norm_kernel
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.sgmv import TileList
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.attention import Attention
from minivllm.layers.linear import LinearBase, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.summing import Summing

Rest = Callable[..., torch.Tensor | None]


def rest_for(
    base: LinearBase, update: Update, tiles: TileList, slots: torch.Tensor, y: torch.Tensor
) -> Rest | None:
    """What the module that alone reads the output can do with it, if it lacks the update; None: nobody can.

    slots   (T,) int64 slot of each row, -1 = base
    y       (T, N) output without the update; of several processes, this one's term of a sum

    A norm behind several processes reads their sum. The update's h is a term, too, so such a norm sums both.
    """
    reader, n = base.read_by, len(update.b)
    if isinstance(reader, SiluAndMul) and n == 2:
        return functools.partial(adapted_silu, update, tiles=tiles)
    if isinstance(reader, Attention):
        return functools.partial(adapted_rotary, update, tiles=tiles)
    kernel = norm_kernel(len(slots), update.rank) if isinstance(reader, RMSNorm) and n == 1 else None
    if kernel == "tiles" and base.tp_size == 1:
        return functools.partial(adapted_norm_of_tiles, update, tiles, reader.weight, reader.eps)
    if kernel != "rows":
        return None
    of_norm = update, slots, reader.weight, reader.eps
    if base.tp_size == 1:
        return functools.partial(adapted_norm, *of_norm)
    words = base.tp.words_for(y) if isinstance(base, RowParallelLinear) else None
    return None if words is None else Summing(adapted_peer_norm, *of_norm, words)


def leave(base: LinearBase, rest: Rest | None) -> None:
    """Tell who reads the output what is left to do. None, too: there may be something of a step that ended."""
    if isinstance(base.read_by, SiluAndMul | RMSNorm | Attention):
        base.read_by.rest = rest
