"""Reads the base model's weights. Stands for vllm/model_executor/model_loader/default_loader.py (v0.22.1)."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minivllm.layers.fused_moe import FusedMoE
from minivllm.progress import ProgressBar

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHOW_PROGRESS_AFTER_SECONDS = 2.0
# Tensors that old checkpoints carry and the model computes itself.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
LISTED_NAMES = 8
# Small enough that 32 layers of it stay finite in half precision, large enough that rows differ.
DUMMY_STD = 0.02


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes.

    target  the parameter it fills, or the rows of one
    parts   the names of the smallest tensors that would fill the same: its own, unless it is a fused one
    """

    target: torch.Tensor
    parts: tuple[str, ...]


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill every parameter of `model` from a Hugging Face folder's safetensors files, converting the dtype.

    A fused linear, and the experts of a layer, may be stored as one tensor or as their parts. Names become ours
    by the model's hf_to_vllm_mapper, where it has one.

    Raises FileNotFoundError for a missing file; ValueError for a corrupt file, for a tensor of another shape
    or kind or without a place in the model, and for a parameter that no tensor fills, or more than one.
    """
    places = parameter_places(model)
    waiting, unexpected = {part for place in places.values() for part in place.parts}, []
    tensors = iterate_tensors(Path(folder))
    for name, tensor in ProgressBar(
        tensors, "Loading weights", len(waiting), delay=SHOW_PROGRESS_AFTER_SECONDS
    ):
        our_name = _our_name(model, name)
        if our_name is None:
            continue
        if our_name not in places:
            unexpected.append(name)
            continue
        place = places[our_name]
        if not waiting.issuperset(place.parts):
            raise ValueError(
                f"tensor {name!r} appears in more than one file of {folder}, or in another form too"
            )
        _copy(place.target, tensor, name)
        waiting.difference_update(place.parts)
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


def parameter_places(model: nn.Module) -> dict[str, Place]:
    """Where each tensor that a checkpoint may have goes, by its name after hf_to_vllm_mapper.

    Fused linears and their parts come from the model's packed_modules_mapping, rows from the linear's
    output_sizes; experts from its expert_params_mapping. A parameter with two owners (tied embeddings) is listed
    under its first name only.
    """
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        module, (parent, _, leaf) = model.get_submodule(path), path.rpartition(".")
        if isinstance(module, FusedMoE):
            continue
        slices = model.packed_modules_mapping.get(leaf)
        if slices is None:
            places[name] = Place(parameter.data, (name,))
            continue
        parts = [f"{parent}.{source}.{kind}" for source in slices]
        places |= _fused_places(name, parameter.data, parts, parameter.data.split(module.output_sizes))
    for path, module in model.named_modules():
        if isinstance(module, FusedMoE):
            places |= _expert_places(path, module, model.expert_params_mapping)
    return places


def _expert_places(path: str, experts: FusedMoE, names: tuple[str, ...]) -> dict[str, Place]:
    """The experts of a layer, one by one under the checkpoint's names, or all in one tensor."""
    w1, w2, w3 = names
    numbers = range(experts.num_experts)
    gate_up = [f"{path}.{number}.{name}.weight" for number in numbers for name in (w1, w3)]
    down = [f"{path}.{number}.{w2}.weight" for number in numbers]
    w13_weight, w2_weight = experts.w13_weight.data, experts.w2_weight.data
    halves = w13_weight.view(-1, experts.intermediate_size, experts.hidden_size)  # (2E, I, H)
    places = _fused_places(f"{path}.gate_up_proj", w13_weight, gate_up, halves)
    return places | _fused_places(f"{path}.down_proj", w2_weight, down, w2_weight)


def _fused_places(
    name: str, whole: torch.Tensor, parts: list[str], pieces: Iterable[torch.Tensor]
) -> dict[str, Place]:
    """A fused tensor under its own name, and its pieces under theirs."""
    places = {part: Place(piece, (part,)) for part, piece in zip(parts, pieces, strict=True)}
    return places | {name: Place(whole, tuple(parts))}


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


def _our_name(model: nn.Module, name: str) -> str | None:
    """A checkpoint tensor's name in the model; None for one that is not read."""
    mapper = model.hf_to_vllm_mapper
    our_name = mapper._map_name(name) if mapper is not None else name
    if our_name is None or our_name.endswith(IGNORED_SUFFIXES):
        return None
    # The embeddings are the output too; some checkpoints store them twice all the same.
    return None if our_name == "lm_head.weight" and model.config.tie_word_embeddings else our_name


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
