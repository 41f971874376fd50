"""Reads the base model's weights. Stands for vllm/model_executor/model_loader/default_loader.py (v0.22.1)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.linear import LinearBase, RowParallelLinear
from minivllm.progress import followed

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Tensors that old checkpoints carry and the model computes itself.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
LISTED_NAMES = 8
# Small enough that 32 layers of it stay finite in half precision, large enough that rows differ.
DUMMY_STD = 0.02


# A piece of a parameter, and which part of a checkpoint's tensor fills it.
Copies = list[tuple[torch.Tensor, tuple[slice, ...]]]


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes.

    shape   of all of the tensor
    copies  what this process has of it
    parts   the names of the smallest tensors that would fill the same: its own, unless it is a fused one
    """

    shape: tuple[int, ...]
    copies: Copies
    parts: tuple[str, ...]


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill every parameter of `model` from a Hugging Face folder's safetensors files, converting the dtype.

    Of each tensor only the rows and columns are read that this process has.
    A fused linear, and the experts of a layer, may be stored as one tensor or as their parts. Names become ours
    by the model's hf_to_vllm_mapper, where it has one.

    Raises FileNotFoundError for a missing file; ValueError for a corrupt file, for a tensor of another shape
    or kind or without a place in the model, and for a parameter that no tensor fills, or more than one.
    """
    places = parameter_places(model)
    waiting, unexpected = {part for place in places.values() for part in place.parts}, []
    tensors = iterate_tensors(Path(folder))
    for name, tensor in followed(tensors, "Loading weights", len(waiting)):
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
        _copy(place, tensor, name)
        waiting.difference_update(place.parts)
    if unexpected or waiting:
        raise ValueError(
            f"{folder} does not fit the model its config.json describes: "
            f"unexpected tensors: {_listed(unexpected)}; missing tensors: {_listed(sorted(waiting))}"
        )


def initialize_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter with random numbers, norms with ones (vLLM: the same name).

    They are drawn where the parameters lie; the same seed gives the same weights on the same kind of device. Processes
    that share a model draw all of it, each parameter at a time, and keep their parts.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
            continue
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        shape, copies = _whole(model, name, parameter.data)
        has_all = shape == parameter.shape and copies
        whole = parameter.data if has_all else parameter.data.new_empty(shape)
        whole.normal_(0.0, DUMMY_STD, generator=generators[device])
        for piece, index in () if has_all else copies:
            piece.copy_(whole[index])


def parameter_places(model: nn.Module) -> dict[str, Place]:
    """Where each tensor that a checkpoint may have goes, by its name after hf_to_vllm_mapper.

    Fused linears and their parts come from the model's packed_modules_mapping, rows from the linear's
    heights; experts from its expert_params_mapping. A parameter with two owners (tied embeddings) is listed
    under its first name only.
    """
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        module, (parent, _, leaf) = model.get_submodule(path), path.rpartition(".")
        if isinstance(module, FusedMoE):
            continue
        slices = model.packed_modules_mapping.get(leaf, ())
        parts = tuple(f"{parent}.{source}.{kind}" for source in slices)
        places[name] = Place(*_whole(model, name, parameter.data), parts or (name,))
        pieces = zip(_slices(module, parameter.data), module.heights) if parts else ()
        for part, ((piece, rows), height) in zip(parts, pieces):
            shape, columns = (height, *places[name].shape[1:]), _columns(module, parameter.data)
            places[part] = Place(shape, [(piece, (rows, *columns))], (part,))
    for path, module in model.named_modules():
        if isinstance(module, FusedMoE):
            places |= _expert_places(path, module, model.expert_params_mapping)
    return places


def _whole(model: nn.Module, name: str, parameter: torch.Tensor) -> tuple[tuple[int, ...], Copies]:
    """The shape of all of a parameter, and what this process has of it."""
    path, kind = name.rsplit(".", 1)
    module = model.get_submodule(path)
    if isinstance(module, FusedMoE):
        return _whole_experts(module)[kind]
    if isinstance(module, VocabParallelEmbedding):
        own = parameter[: module.rows.stop - module.rows.start]
        return (module.num_embeddings, module.embedding_dim), [(own, (module.rows, slice(None)))]
    if not isinstance(module, LinearBase):
        return tuple(parameter.shape), [(parameter, (slice(None),) * parameter.ndim)]
    shape = (sum(module.heights), module.input_size)[: parameter.ndim]
    if isinstance(module, RowParallelLinear) and kind == "bias" and module.tp.rank:
        parameter.zero_()
        return shape, []
    copies, first = [], 0
    for (piece, rows), height in zip(_slices(module, parameter), module.heights):
        columns = _columns(module, parameter)
        copies.append((piece, (slice(first + rows.start, first + rows.stop), *columns)))
        first += height
    return shape, copies


def _slices(module: LinearBase, parameter: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """Of each linear that a layer fuses: where its rows lie in a parameter, and which these are."""
    sizes = module.output_partition_sizes
    return list(zip(parameter[: sum(sizes)].split(sizes), module.rows, strict=True))


def _columns(module: LinearBase, parameter: torch.Tensor) -> tuple[slice, ...]:
    """Which columns of a weight; a bias has none."""
    return (module.columns,) if parameter.ndim > 1 else ()


def _whole_experts(experts: FusedMoE) -> dict[str, tuple[tuple[int, ...], Copies]]:
    """As `_whole`, of both parameters of a layer's experts."""
    count, width, hidden = experts.num_experts, experts.intermediate_size, experts.hidden_size
    inner, everything = experts.inner, slice(None)
    w13_weight, w2_weight = experts.w13_weight.data, experts.w2_weight.data
    gate, up = w13_weight.chunk(2, dim=1)  # (E, own part of I, H) each
    rows_of_up = slice(width + inner.start, width + inner.stop)
    w13 = [(gate, (everything, inner, everything)), (up, (everything, rows_of_up, everything))]
    return {
        "w13_weight": ((count, 2 * width, hidden), w13),
        "w2_weight": ((count, hidden, width), [(w2_weight, (everything, everything, inner))]),
    }


def _expert_places(path: str, experts: FusedMoE, names: tuple[str, ...]) -> dict[str, Place]:
    """The experts of a layer, one by one under the checkpoint's names, or all in one tensor."""
    w1, w2, w3 = names
    wholes, inner, everything = _whole_experts(experts), experts.inner, slice(None)
    shape = experts.intermediate_size, experts.hidden_size
    gate_up, down = {}, {}
    for number, (w13, w2_weight) in enumerate(zip(experts.w13_weight.data, experts.w2_weight.data)):
        for name, rows in zip((w1, w3), w13.chunk(2)):
            part = f"{path}.{number}.{name}.weight"
            gate_up[part] = Place(shape, [(rows, (inner, everything))], (part,))
        part = f"{path}.{number}.{w2}.weight"
        down[part] = Place(shape[::-1], [(w2_weight, (everything, inner))], (part,))
    fused = {
        f"{path}.gate_up_proj": Place(*wholes["w13_weight"], tuple(gate_up)),
        f"{path}.down_proj": Place(*wholes["w2_weight"], tuple(down)),
    }
    return {**gate_up, **down, **fused}


def iterate_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the folder's safetensors files, one at a time; what is asked for is read (`get_slice`)."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    yield name, tensors.get_slice(name)
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


def _copy(place: Place, source: Any, name: str) -> None:
    """Read what this process has of a tensor.   source: as `iterate_tensors` gives it"""
    if (shape := tuple(source.get_shape())) != place.shape:
        raise ValueError(f"tensor {name!r} has shape {shape} but the model needs {place.shape}")
    for piece, index in place.copies:
        if not piece.numel():
            continue
        tensor = source[index]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; quantized weights are not supported")
        piece.copy_(tensor)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return (", ".join(names[:LISTED_NAMES]) or "none") + more
