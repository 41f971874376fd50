"""Kernels: on a GPU where there is one, else through Triton's interpreter."""

from collections.abc import Iterator

import torch

from labs.demos.small import mixed_batch, numbers
from minivllm.config import LoRAConfig
from minivllm.gpu.sgmv import expand, shrink, tiles_of
from minivllm.gpu.sgmv.lora_kernel_metadata import build_tiles
from minivllm.gpu.triton_backend import TritonBackend
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.slots import Slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (1, -1, 0, 1)


def demo_4_1() -> Iterator[str]:
    slots = torch.tensor([2, 0, 2, -1, 2])
    rows, tiles = build_tiles(slots, 3, 5, block_rows=2)
    yield f"slots of the rows {slots.tolist()}; rows by slot {rows.tolist()}"
    for slot, first, length in tiles.t().tolist():
        yield (
            f"  tile of slot {slot}: rows {rows[first : first + length].tolist()}"
            if slot >= 0
            else "  no tile"
        )


def matrix(slots: int, height: int, width: int) -> torch.Tensor:
    """(slots, height, width): every element of slot s is s + 1."""
    filled = torch.arange(1, slots + 1, dtype=torch.float32, device=DEVICE)[:, None, None]
    return filled.expand(slots, height, width).contiguous()


def demo_4_2() -> Iterator[str]:
    x = torch.arange(4, dtype=torch.float32, device=DEVICE)[:, None].expand(4, 20).contiguous()
    h = torch.full((1, 1, 4, 2), -7.0, device=DEVICE)
    ranks = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    shrink(x, [matrix(2, 2, 20)], tiles_of(torch.tensor(ROWS, device=DEVICE), 2), ranks, scaling=0.5, h=h)
    for row, slot in enumerate(ROWS):
        said = "base, never written" if slot < 0 else f"20 x {row} x {slot + 1} / 2, live rank {slot + 1}"
        yield f"row {row}: h {numbers(h[0, 0, row])}  {said}"


def demo_4_3() -> Iterator[str]:
    h = (
        torch.arange(4, dtype=torch.float32, device=DEVICE)[None, None, :, None]
        .expand(2, 1, 4, 2)
        .contiguous()
    )
    y = torch.full((4, 3), 0.5, device=DEVICE)
    expand(h, [matrix(2, 3, 2)], y, tiles_of(torch.tensor(ROWS, device=DEVICE), 2))
    for row, slot in enumerate(ROWS):
        said = "base, left alone" if slot < 0 else f"+ 2 splits x 2 ranks x {row} x {slot + 1}"
        yield f"row {row}: y {numbers(y[row])}  {said}"


def demo_4_4() -> Iterator[str]:
    base = RowParallelLinear(16, 16, bias=False, params_dtype=torch.float32).to(DEVICE)
    base.weight.data = torch.eye(16, device=DEVICE)
    config = LoRAConfig(max_loras=2, max_lora_rank=8)
    backend = TritonBackend(8, 8, DEVICE, config.max_loras)
    slots = backend.place(Slots.empty(2, 8, [(16, 16)], torch.float32, DEVICE), base)
    for slot in (0, 1):
        pair = torch.ones(1, 16), torch.full((16, 1), 1.0 + slot)
        slots.write(slot, [LoRALayerWeights("o_proj", 1, 1, *pair)])
    x = torch.arange(4, dtype=torch.float32, device=DEVICE)[:, None].expand(4, 16).contiguous()
    yield "x is 0, 1, 2, 3 by rows, 16 wide; the base gives it back; adapter 5 adds 16 times it, adapter 6 32 times"
    for ids in ((6, 0, 5, 6), (0, 0, 0, 0)):
        backend.begin_step(LoRAMapping(ids, ()), [5, 6])
        first = backend.linear(x, base, slots)[:, 0]
        yield f"rows of adapters {' '.join(map(str, ids))}: first column {numbers(first)}, base only: {backend.no_lora}"


def demo_4() -> Iterator[str]:
    backend = TritonBackend(8, 8, DEVICE, 4)
    yield from mixed_batch({"two launches": (backend, backend.linear)}, torch.float32, DEVICE)
    rows, tiles = build_tiles(backend.token_lora_indices, 4, 6, block_rows=2)
    told = [f"slot {s} rows {rows[i : i + n].tolist()}" for s, i, n in tiles.t().tolist() if s >= 0]
    yield f"tiles of two rows: {'; '.join(told)}"
