"""Products of rows that have adapters of their own."""

from collections.abc import Iterator
from functools import partial

import torch

from labs.demos.small import H, mixed_batch, numbers, ones, weights
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.backend import Backend
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.mapping import LoRAMapping, compute_runs, slots_of
from minivllm.lora.ops.by_run import expand_runs, products, shrink_runs
from minivllm.lora.ops.by_token import bgmv_shrink
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.slots import Slots

SLOTS = [1, 1, -1, 0]


def demo_3_1() -> Iterator[str]:
    table = [9, None, 4]
    yield f"slots hold {table}"
    yield f"rows of adapters 4 4 0 9 find theirs in slots {slots_of((4, 4, 0, 9), table)}"
    try:
        yield f"rows of adapters 4 7 go to slots {slots_of((4, 7), table)}"
    except ValueError as error:
        yield f"refused: {error}"


def a_of_two_slots() -> torch.Tensor:
    """(2, 2, 3): every element of slot 0 is 1, of slot 1 it is 10."""
    return torch.stack([ones(2, 3), ones(2, 3, value=10)])


def demo_3_2() -> Iterator[str]:
    h, x = ones(4, 3, value=-7), torch.arange(12, dtype=torch.float64).view(4, 3)
    bgmv_shrink(x, a_of_two_slots(), h, torch.tensor(SLOTS), scaling=0.5)
    for row, slot in enumerate(SLOTS):
        said = "base, left alone" if slot < 0 else f"half of A of slot {slot} times {numbers(x[row])}"
        yield f"row {row}: {numbers(h[row])}  {said}"
    yield "the third column is past the rank: -7 is what was there"


def demo_3_4() -> Iterator[str]:
    for slots in ([2, 2, -1, 2], [-1, -1], [0, 1, 1, 1, 0]):
        runs = ", ".join(
            f"slot {slot} in rows {rows.start} to {rows.stop - 1}" for slot, rows in compute_runs(slots)
        )
        yield f"slots {slots}: {runs or 'no run'}"


def demo_3_5() -> Iterator[str]:
    runs, x, h = [(1, slice(0, 2)), (0, slice(3, 4))], ones(4, 3), ones(4, 3, value=-7)
    yield "x is 1 everywhere, three wide; A and B of slot 0 are 1, A of slot 1 is 10 and its B 3"
    yield "rows 0 and 1 have slot 1, row 2 is base, row 3 has slot 0"
    shrink_runs(x, a_of_two_slots(), h, runs, scaling=2)
    yield f"shrunk, times 2: {numbers(h)}; expected are 2 x 3 x 10 and 2 x 3 x 1"
    b, y = torch.stack([ones(2, 2), ones(2, 2, value=3)]), ones(4, 4, value=0.5)
    expand_runs(h, b, y, runs, slice_offset=1, slice_size=2)
    yield f"added to columns 1 and 2: {numbers(y)}; expected are 60 x 2 x 3 and 6 x 2 x 1 more"
    expand_runs(h, b, y, runs, slice_offset=1, slice_size=2, add_inputs=False)
    yield f"put there instead: {numbers(y)}"
    scattered, x = [(1, slice(0, 1)), (0, slice(1, 2)), (1, slice(2, 4))], torch.arange(4).double()[:, None]
    for rows, product in products(x, ones(2, 2, 1), scattered, x.dtype):
        found = torch.arange(4)[rows].tolist()
        yield f"runs 1 0 1, x is its row's number: one product of rows {found}: {numbers(product)}"


def demo_3_6() -> Iterator[str]:
    base = RowParallelLinear(H, H, bias=False, params_dtype=torch.float64)
    base.weight.data = torch.eye(H, dtype=torch.float64)
    backend = RunsBackend("cpu")
    slots = backend.place(Slots.empty(2, 2, [(H, H)], torch.float64, "cpu"), base)
    slots.write(0, [weights("o_proj", 1, 100.0)])
    x = torch.arange(4, dtype=torch.float64)[:, None].expand(4, H)
    yield f"x is 0, 1, 2, 3 by rows, {H} wide; the base gives it back; adapter 7 adds {H} x 100 times it"
    for ids in ((0, 0, 7, 7), (0, 0, 0, 0)):
        backend.begin_step(LoRAMapping(ids, ()), [7, None])
        yield f"rows of adapters {' '.join(map(str, ids))}: {numbers(backend.linear(x, base, slots))}"


def demo_3() -> Iterator[str]:
    runs, loops = RunsBackend("cpu"), LoopsBackend("cpu")
    ways = {
        "run by run (3.6)": (runs, runs.linear),
        "adapter by adapter (3.5)": (runs, partial(Backend.linear, runs)),
        "token by token (3.2)": (loops, loops.linear),
    }
    yield from mixed_batch(ways, torch.float64, "cpu")
