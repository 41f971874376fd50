"""Many random adapters in seconds."""

import os
import shutil
from pathlib import Path

import torch

from minivllm.commands.random_adapter import save_random_adapter
from minivllm.lora.request import LoRARequest

# Adapters whose numbers differ; further ones are other folders with links to the same files. Speed does not
# depend on the numbers: the engine reads, keeps and copies every folder by itself.
DISTINCT = 4


def write_adapters(folder: Path, model: str, count: int, rank: int) -> list[LoRARequest]:
    """Write `count` adapter folders under `folder`; requests with ids 1 to `count` that name them."""
    paths = [folder / f"adapter-{number + 1}" for number in range(count)]
    for number, path in enumerate(paths):
        if number < DISTINCT:
            save_random_adapter(path, model, rank, seed=number, dtype=torch.bfloat16)
        else:
            shutil.copytree(paths[number % DISTINCT], path, copy_function=os.link)
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
