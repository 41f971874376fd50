"""Reads the base model's weights. Stands for vllm/model_executor/model_loader/default_loader.py (v0.22.1)."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHOW_PROGRESS_AFTER_SECONDS = 2.0
# Tensors that old checkpoints carry and the model computes itself.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
LISTED_NAMES = 8
# Small enough that 32 layers of it stay finite in half precision, large enough that rows differ.
DUMMY_STD = 0.02


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill every parameter of `model` from a Hugging Face folder's safetensors files, converting the dtype.

    Raises FileNotFoundError for a missing file; ValueError for a corrupt file, for a tensor of another shape
    or kind or without a place in the model, and for a parameter that no tensor fills.
    """
    places = parameter_slices(model)
    tied = getattr(model, "config", None) is not None and model.config.tie_word_embeddings
    waiting, unexpected = set(places), []
    tensors = iterate_tensors(Path(folder))
    for name, tensor in tqdm(tensors, "Loading weights", len(places), delay=SHOW_PROGRESS_AFTER_SECONDS):
        if name.endswith(IGNORED_SUFFIXES) or (tied and name == "lm_head.weight"):
            continue
        if name not in places:
            unexpected.append(name)
            continue
        if name not in waiting:
            raise ValueError(f"tensor {name!r} appears in more than one file of {folder}")
        _copy(places[name], tensor, name)
        waiting.remove(name)
    if unexpected or waiting:
        raise ValueError(
            f"{folder} does not fit the model its config.json describes: "
            f"unexpected tensors: {_listed(unexpected)}; missing tensors: {_listed(sorted(waiting))}"
        )


def initialize_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter with random numbers, norms with ones (vLLM: the same name).

    They are drawn where the parameters lie; the same seed gives the same weights on the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
            continue
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        parameter.data.normal_(0.0, DUMMY_STD, generator=generators[device])


def parameter_slices(model: nn.Module) -> dict[str, torch.Tensor]:
    """Where each checkpoint tensor goes: its name -> a parameter, or the rows of a fused one.

    The fused linears come from the model's packed_modules_mapping, their rows from the linear's output_sizes.
    A parameter with two owners (tied embeddings) is listed under its first name only.
    """
    places: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        parent, _, leaf = path.rpartition(".")
        slices = model.packed_modules_mapping.get(leaf)
        if slices is None:
            places[name] = parameter.data
            continue
        sizes = model.get_submodule(path).output_sizes
        for source, rows in zip(slices, parameter.data.split(sizes), strict=True):
            places[f"{parent}.{source}.{kind}"] = rows
    return places


def iterate_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder's safetensors files, one at a time."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a readable safetensors file ({error}); download it again"
            ) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those the index names, or the single one."""
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; only safetensors checkpoints are read")
    return files


def _copy(place: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    if place.shape != tensor.shape:
        raise ValueError(
            f"tensor {name!r} has shape {tuple(tensor.shape)} but the model needs {tuple(place.shape)}"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; quantized weights are not supported")
    place.copy_(tensor)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return (", ".join(names[:LISTED_NAMES]) or "none") + more
