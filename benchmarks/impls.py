"""The engine's own wrapped linears behind the protocol of the layer benchmark.

    make(w, a, b, slices, token_slots, ranks, phase) -> run        run(x) -> y

    w            (N, K)      base weight
    a            (S, n*R, K) A of every slot, slices stacked along rows, rows past the live rank zero
    b            (S, N, R)   B of every slot, scaled already
    slices       [N_0, ..]   output widths of the n packed projections, sum N
    token_slots  (T,) int32  slot of each row, -1 = base row
    ranks        [r_0, ..]   live rank of each slot
    phase        "decode" or "prefill"
    run(x)       (T, K) -> (T, N), which may be a view of a wider buffer

What `make` does is not timed, what `run` does is.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.gpu.fused.blocks import linear_deferred
from minivllm.gpu.kernels.update import DeferredUpdate
from minivllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from minivllm.lora.model_manager import make_backend
from minivllm.lora.wrapping import from_layer
from minivllm.vllm.layers import LoRAMapping

Run = Callable[[torch.Tensor], torch.Tensor]


def base(w: torch.Tensor, *_: object) -> Run:
    """The base product alone: what the others are compared with."""
    return lambda x: x @ w.t()


def engine_linear(
    backend: str,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slices: Sequence[int],
    token_slots: torch.Tensor,
    ranks: Sequence[int],
    phase: str = "decode",  # which makes no difference to the engine
) -> Run:
    """A wrapped linear as the engine makes it, its slots filled as the engine fills them."""
    tokens, (slots, _, rank) = len(token_slots), b.shape
    config = LoRAConfig(rank, slots, lora_dtype=w.dtype, punica_backend=backend)
    layer = from_layer(base_linear(w, slices), slots, config, [f"part_{i}" for i in range(len(slices))])
    punica = make_backend(tokens, tokens, w.device, config, LORA_EXTENSIONS)
    layer.set_mapping(punica)
    offsets = (0, *itertools.accumulate(slices))
    for slot, live in enumerate(ranks):
        lora_a = [part[:live] for part in a[slot].split(rank)]
        lora_b = [b[slot, low:high, :live] for low, high in itertools.pairwise(offsets)]
        layer.set_lora(slot, lora_a, lora_b)
    ids = [slot + 1 for slot in token_slots.tolist()]
    table = list(range(1, slots + 1))
    punica.begin_step(LoRAMapping(ids, ids, is_prefill=True), table)
    return EngineRun(layer)


@dataclass(frozen=True)
class EngineRun:
    """A wrapped linear as `run`."""

    layer: nn.Module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]

    def deferred(self, x: torch.Tensor) -> tuple[torch.Tensor, DeferredUpdate | None]:
        """The output, and what adapters still have to add to it: a kernel behind it may."""
        return linear_deferred(self.layer, x)


looped = functools.partial(
    engine_linear, "grouped"
)  # phase 03: two products for each run of rows, by PyTorch
sgmv = functools.partial(engine_linear, "triton")  # a shrink and an expand after the base product
paged = functools.partial(engine_linear, "paged")  # a shrink and an expand from pages


def gathered(
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slices: Sequence[int],
    token_slots: torch.Tensor,
    ranks: Sequence[int],
    phase: str = "decode",
) -> Run:
    """What comes to mind first: A and B once for every row, and batched products. ValueError for prompts: no room."""
    if phase != "decode":
        raise ValueError("a copy of A and B for each token of a prompt does not fit")
    is_lora = token_slots >= 0
    row_slots = token_slots.clamp(min=0).long()
    rank = b.shape[2]

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x @ w.t()  # (T, N)
        h = torch.bmm(a[row_slots], x[:, :, None]).squeeze(2) * is_lora[:, None]  # (T, n * R)
        row_b = b[row_slots]  # (T, N, R)
        for i, (part, part_h) in enumerate(zip(row_b.split(list(slices), dim=1), h.split(rank, dim=1))):
            first = sum(slices[:i])
            y[:, first : first + slices[i]] += torch.bmm(part, part_h[:, :, None]).squeeze(2)
        return y

    return run


def base_linear(w: torch.Tensor, slices: Sequence[int]) -> LinearBase:
    """The engine's linear of that many slices, with `w` (not a copy) for its weight.   ValueError for four or more"""
    kinds = {"bias": False, "params_dtype": w.dtype, "device": "meta"}
    if len(slices) == 1:
        layer = ReplicatedLinear(w.shape[1], w.shape[0], **kinds)
    elif len(slices) == 2:
        layer = MergedColumnParallelLinear(w.shape[1], list(slices), **kinds)
    elif len(slices) == 3:
        q, kv, _ = slices
        head = math.gcd(q, kv)
        layer = QKVParallelLinear(w.shape[1], head, q // head, kv // head, **kinds)
    else:
        raise ValueError(f"no linear of the engine has {len(slices)} slices")
    layer.weight = nn.Parameter(w, requires_grad=False)
    return layer
