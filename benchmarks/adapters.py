"""Many random adapters in seconds."""

import os
import shutil
from pathlib import Path

import torch

from minivllm.commands.random_adapter import save_random_adapter
from minivllm.lora.request import LoRARequest

# Adapters of a rank whose numbers differ; further ones are other folders with links to the same files. Speed does not
# depend on the numbers: the engine reads, keeps and copies every folder by itself.
DISTINCT = 4


def write_adapters(
    folder: Path, model: str, count: int, rank: int, lowest: int | None = None
) -> list[LoRARequest]:
    """Write `count` adapter folders under `folder`; requests with ids 1 to `count` that name them.

    lowest   of the ranks, which adapters have in turns; None = all have `rank`
    """
    paths = [folder / f"adapter-{number + 1}" for number in range(count)]
    ranks = ranks_of(count, rank, lowest)
    distinct = max(DISTINCT, len(set(ranks)))
    for number, path in enumerate(paths):
        if number < distinct:
            save_random_adapter(path, model, ranks[number], seed=number, dtype=torch.bfloat16)
        else:
            shutil.copytree(paths[number % distinct], path, copy_function=os.link)
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]


def ranks_of(count: int, rank: int, lowest: int | None = None) -> list[int]:
    """`rank` first, then one less in turns, down to `lowest`."""
    span = rank - (lowest or rank) + 1
    distinct = max(DISTINCT, span)
    return [rank - number % distinct % span for number in range(count)]
