"""Good adapter folders that are spoiled, and all that the engine has to say against one."""

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minivllm.assembly import parts_of
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig
from minivllm.lora.judging import judge_adapter
from minivllm.lora.loading import AdapterSource
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.registry import MODELS
from tests.worlds.adapter_folders import CONFIG, WEIGHTS

PICKLE = "adapter_model.bin"
Q0 = "model.layers.0.self_attn.q_proj"
A0, B0 = (f"base_model.model.{Q0}.lora_{side}.weight" for side in "AB")

Spoiling = Callable[[Path], object]


def problems_of(folder: Path | str, base: Path, **options: object) -> list[str]:
    """What an engine with these options of LoRA says against an adapter; [] if it would serve it."""

    def source(lora_config: LoRAConfig) -> AdapterSource:
        config = EngineConfig(ModelConfig(str(base)), lora_config=lora_config)
        architecture = config.model_config.architecture
        worker = LRUCacheWorkerLoRAManager(config, "cpu", extensions=parts_of(config).lora)
        worker.create_lora_manager(MODELS[architecture.architecture](architecture, torch.float32, "meta"))
        return worker.source

    return judge_adapter(str(folder), LoRAConfig(**{"max_lora_rank": 64, **options}), source).problems


def assert_said(sentences: list[str], *expected: list[str]) -> None:
    """A sentence for each list of words, which holds them all, in this order and no other."""
    __tracebackhide__ = True
    assert len(sentences) == len(expected), sentences
    for sentence, words in zip(sentences, expected):
        missing = [word for word in words if word not in sentence]
        assert not missing, f"{missing} not in: {sentence}"
        assert sentence.isprintable() and "Traceback" not in sentence


def trained_by_peft(folder: Path, base: Path, config: object = None, **options: object) -> Path:
    """What PEFT saves for a config, or for a LoraConfig with these options."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        get_peft_model(model, config or LoraConfig(**{**defaults, **options})).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """`...` takes a field out."""
    config = {**json.loads((folder / CONFIG).read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(kept))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def fill(folder: Path, value: float) -> None:
    edit_weights(folder, lambda weights: {name: torch.full_like(w, value) for name, w in weights.items()})


def with_tensor(name: str, tensor: torch.Tensor) -> Spoiling:
    """Another one beside the others, or in the place of one of them."""
    return lambda folder: edit_weights(folder, lambda weights: {**weights, name: tensor})


def with_a0(*shape: int) -> Spoiling:
    return with_tensor(A0, torch.ones(shape))


def without(name: str) -> Spoiling:
    return lambda folder: edit_weights(
        folder, lambda weights: {n: weight for n, weight in weights.items() if n != name}
    )


def renamed(old: str, new: str) -> Spoiling:
    return lambda folder: edit_weights(
        folder, lambda weights: {name.replace(old, new): weight for name, weight in weights.items()}
    )


def write(name: str, content: bytes) -> Spoiling:
    return lambda folder: (folder / name).write_bytes(content)


def cut_short(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


class Payload:
    """Unpickled, it makes a folder where it lies."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


def as_pickle(content: object, save: Callable = torch.save) -> Spoiling:
    """The weights are in a pickle, which holds something else."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        save(content, folder / PICKLE)

    return spoil


def as_raw_pickle(content: object) -> Spoiling:
    return as_pickle(content, lambda content, path: path.write_bytes(pickle.dumps(content)))


def adding_tokens(
    count: int = 3, width: int = 48, name: str = "input_embeddings", value: float = 1.0
) -> Spoiling:
    """What vLLM up to 0.10 read beside an adapter."""
    tensors = {name: torch.full((count, width), value)}
    return lambda folder: save_file(tensors, folder / "new_embeddings.safetensors")
