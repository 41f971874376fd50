"""Many random adapters in seconds."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def write_dora_adapters(folder: Path, model: str, count: int, rank: int) -> list[LoRARequest]:
    """As `write_adapters` under `folder`/dora, with magnitudes between 0.5 and 1.5. Their ids follow on 100,000."""
    requests = write_adapters(folder / "dora", model, count, rank)
    for number, request in enumerate(requests):
        path, generator = Path(request.lora_path), torch.Generator().manual_seed(number)
        tensors = load_file(path / "adapter_model.safetensors")
        for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
            lengths = torch.empty(len(tensors[name])).uniform_(0.5, 1.5, generator=generator)
            magnitude = name.replace(".lora_B.weight", ".lora_magnitude_vector")
            tensors[magnitude] = lengths.to(tensors[name].dtype)
        config = json.loads((path / "adapter_config.json").read_text())
        for file in path.iterdir():  # maybe one that another adapter's name is for, too
            file.unlink()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    return [
        LoRARequest(f"dora-{request.lora_name}", 100_000 + request.lora_int_id, request.lora_path)
        for request in requests
    ]


def write_mixes(folder: Path, model: str, count: int, rank: int) -> list[LoRARequest]:
    """As `write_adapters` under `folder`/parts, each a mix of two adapters of half the rank."""
    if not count:
        return []
    from minivllm.mixes import mix  # an extension, which only these need

    parts = [
        LoRARequest(f"part-{part.lora_name}", 200_000 + part.lora_int_id, part.lora_path)
        for part in write_adapters(folder / "parts", model, 2 * count, rank // 2)
    ]
    return [mix([(one, 0.7), (other, 0.3)]) for one, other in zip(parts[::2], parts[1::2])]


def ranks_of(count: int, rank: int, lowest: int | None = None) -> list[int]:
    """`rank` first, then one less in turns, down to `lowest`."""
    span = rank - (lowest or rank) + 1
    distinct = max(DISTINCT, span)
    return [rank - number % distinct % span for number in range(count)]
