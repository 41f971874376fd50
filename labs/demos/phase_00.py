"""The chapter's table: one linear, three rows, two adapters."""

import importlib
from collections.abc import Iterator

import torch
from torch import nn

from labs.demos.small import numbers


def demo_0_1() -> Iterator[str]:
    one_file = importlib.import_module("phases.00_one_file.multilora")
    base, batch = nn.Linear(2, 2, bias=False), one_file.Batch()
    base.weight = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), requires_grad=False)
    layer = one_file.LoRALinear(base, slots=2, max_rank=1, batch=batch)
    layer.write(0, (torch.tensor([[1.0, -1.0]]), torch.tensor([[0.0], [3.0]])))
    layer.write(1, (torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0], [0.0]])))
    x = torch.tensor([[[3.0, 0.0], [1.0, 1.0], [2.0, 1.0]]])
    yield "W is [1 0] [0 2]; json is in slot 0, sql in slot 1; row 0 is the base model's"
    yield f"x:                      {numbers(x[0])}"
    for said, runs in (
        ("without an adapter:", {}),
        ("row 1 sql, row 2 json:", {1: slice(1, 2), 0: slice(2, 3)}),
        ("rows 1 and 2 json:", {0: slice(1, 3)}),
    ):
        batch.runs = runs
        yield f"{said:23} {numbers(layer(x.clone())[0])}"
