"""Makes what `tests/oracles/recorded.py` reads: `python -m tests.tools.recordings` asks PEFT and transformers anew.

Nothing of minivllm's engine has a part in it: what is recorded is what others answer.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.merged import CONFIGS, PeftAdapters
from tests.oracles.recorded import FOLDER, MERGED, VARIANT, WORLD
from tests.worlds.adapters import change_json
from tests.worlds.engines import TinyWorld
from tests.worlds.models import token_ids

# What the model is asked with every adapter and with none: short prompts, and (length, seed) of random ones.
PROMPTS = [[5, 6], [5, 6, 7]] + [
    token_ids(length, seed)
    for length, seed in (
        *((4 + 3 * i, i) for i in range(10)),
        *((3, 3), (5, 1), (6, 2), (6, 5), (6, 6), (7, 0), (7, 2), (7, 3), (8, 7), (9, 1), (10, 4), (11, 2)),
    )
]
LONGEST = 8  # tokens of an answer
SMALL = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 31, "num_key_value_heads": 4}
KEPT = {"config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"}
VERSIONS = {"peft_version", "transformers_version"}  # entries that are new with every release
TOLERANCE = 1e-12  # of the largest value: float64 on another processor


def record(folder: Path) -> None:
    """All recordings, into a folder that is empty or not there."""
    record_world(folder / WORLD)
    record_merged(folder / MERGED)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.name not in {*KEPT, "answers.json", "merged.safetensors"}:
            path.unlink()
        elif path.name == "adapter_config.json":
            tidy(path)


def tidy(path: Path) -> None:
    """Leave out of an adapter's config what differs from run to run: where its model was, the order of a set."""
    targets = json.loads(path.read_text(encoding="utf-8"))["target_modules"]
    if isinstance(targets, list):
        targets = sorted(targets)
    change_json(path, base_model_name_or_path=None, target_modules=targets)


def record_world(folder: Path) -> None:
    """The tiny world in float32, which holds its random weights without loss, and what PEFT answers there."""
    world = TinyWorld(folder, VARIANT, dtype=torch.float32)
    for name in world.names:
        path = world.path(name) / "adapter_model.safetensors"
        save_file({key: tensor.float() for key, tensor in load_file(path).items()}, path)
    answers = [
        {"adapter": name, "prompt": prompt, "tokens": world.oracle().greedy(name, prompt, LONGEST)}
        for name in (None, *world.names)
        for prompt in PROMPTS
    ]
    lines = ",\n".join(map(json.dumps, answers))
    (folder / "answers.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def record_merged(folder: Path) -> None:
    """For each of CONFIGS an adapter in float32, and what PEFT merges, in float64."""
    adapters = PeftAdapters(**SMALL)
    for name, config in CONFIGS.items():
        path = folder / slug(name)
        _, deltas = adapters.make(config, save_dtype=torch.float32, folder=path)
        save_file(deltas, path / "merged.safetensors")


def slug(name: str) -> str:
    """The folder of one of CONFIGS."""
    return name.replace(",", "").replace(" ", "-")


def differences(recorded: Path, made: Path) -> list[str]:
    """What is not the same in two folders of recordings, a sentence each. Versions and last bits may differ."""
    said = []
    files = [{str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} for root in (recorded, made)]
    for name in sorted(files[0] ^ files[1]):
        said.append(f"{name} is only {'recorded' if name in files[0] else 'made anew'}")
    for name in sorted(files[0] & files[1]):
        read = load_file if name.endswith(".safetensors") else read_json
        old, new = read(recorded / name), read(made / name)
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new or not is_same(old[key], new[key]):
                said.append(f"{name}: {key} is no longer what was recorded")
    return said


def read_json(path: Path) -> dict[str, object]:
    """An object's entries without those of `VERSIONS`, or a list's by the adapter and prompt they are about."""
    held = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(held, list):
        return {f"adapter {entry['adapter']}, prompt {entry['prompt']}": entry for entry in held}
    return {key: value for key, value in held.items() if key not in VERSIONS}


def is_same(old: object, new: object) -> bool:
    if not isinstance(old, torch.Tensor):
        return old == new
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return False
    return torch.allclose(old, new, rtol=0, atol=TOLERANCE * old.abs().max().item())


if __name__ == "__main__":
    torch.set_num_threads(1)  # more only wait for each other on a model this small
    shutil.rmtree(FOLDER, ignore_errors=True)
    record(FOLDER)
