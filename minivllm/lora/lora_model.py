"""An adapter folder, read and checked. Stands for vllm/lora/lora_model.py (v0.22.1)."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import (
    WeightsMapper,
    is_base_embedding_weights,
    is_supported_lora_module,
    parse_fine_tuned_lora_name,
)
from minivllm.lora.peft_helper import PEFTHelper

_load_ids = itertools.count(1)

# PEFT's file names, in the order we prefer them: safetensors cannot run code.
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class LoRAModel:
    """All of one adapter: its weights by module name. vLLM: `LoRAModel`.

    id        the adapter's `lora_int_id`
    rank      the largest rank of its modules
    loras     module name -> LoRALayerWeights
    name      what the request that loaded it called it; for people, nothing depends on it
    load_id   a number no other load ever had. Whatever remembers results of this adapter (the prefix cache)
              uses it as the key: names and ids may come back with other weights, a load_id does not.
    """

    def __init__(self, lora_model_id: int, rank: int, loras: dict[str, LoRALayerWeights]) -> None:
        if lora_model_id < 1:
            raise ValueError(f"a valid lora id should be greater than 0, got {lora_model_id}")
        self.id = lora_model_id
        self.rank = rank
        self.loras = loras
        self.name = ""
        self.load_id = next(_load_ids)

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        return self.loras.get(module_name)

    def check_lora_name(self, lora_name: str) -> bool:
        return lora_name in self.loras

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """The same tensors under another id."""
        return type(self)(lora_model_id, self.rank, self.loras.copy())

    @property
    def nbytes(self) -> int:
        return sum(lora.nbytes for lora in self.loras.values())

    # region lab 1.6: from tensors to modules
    @classmethod
    def from_lora_tensors(
        cls,
        lora_model_id: int,
        tensors: dict[str, torch.Tensor],
        peft_helper: PEFTHelper,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None,
        weights_mapper: WeightsMapper | None = None,
        skip_prefixes: list[str] | None = None,
    ) -> "LoRAModel":
        """Pair up the A and B of every module. Ranks are the tensors' own, scaling is the config's.

        tensors       PEFT name -> tensor; A (r, K), B (N, r)
        dtype         to convert to, None = leave
        skip_prefixes tensors of modules under one of these are left out

        Raises ValueError naming the module: A or B missing, shapes that do not fit together, rank 0, NaN or Inf.
        """
        sides: dict[str, dict[bool, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if is_base_embedding_weights(name):
                continue
            module, is_lora_a = parse_fine_tuned_lora_name(name, weights_mapper)
            if not _is_skipped(module, skip_prefixes or []):
                sides.setdefault(module, {})[is_lora_a] = tensor.to(device=device, dtype=dtype)
        if not sides:
            raise ValueError("the adapter holds no LoRA weights")

        loras = {}
        for module, pair in sides.items():
            _check_pair(module, pair)
            lora = LoRALayerWeights.from_config(module, peft_helper, rank=pair[True].shape[0])
            lora.lora_a, lora.lora_b = pair[True], pair[False]
            loras[module] = lora
        return cls(lora_model_id, max(lora.rank for lora in loras.values()), loras)

    # endregion

    @classmethod
    def from_local_checkpoint(
        cls,
        lora_dir: str,
        expected_lora_modules: Iterable[str],
        peft_helper: PEFTHelper,
        *,
        lora_model_id: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None,
        weights_mapper: WeightsMapper | None = None,
        skip_prefixes: list[str] | None = None,
        shapes_only: bool = False,
    ) -> "LoRAModel":
        """From an adapter folder; `expected_lora_modules` are the names (or ends of names) the model has.
        With `shapes_only` the weights are not read: enough to check an adapter, not to serve it.

        Raises FileNotFoundError when there is no weights file, ValueError when it is damaged, names modules
        the model does not have, or fails the checks of `from_lora_tensors`. vLLM: the same name.
        """
        path = find_weights_file(lora_dir)
        tensors = read_weights(path, shapes_only)
        expected = list(expected_lora_modules)
        _refuse_unexpected(lora_dir, tensors, expected, weights_mapper, skip_prefixes or [])
        try:
            return cls.from_lora_tensors(
                lora_model_id,
                tensors,
                peft_helper,
                device="meta" if shapes_only else device,
                dtype=dtype,
                model_vocab_size=model_vocab_size,
                weights_mapper=weights_mapper,
                skip_prefixes=skip_prefixes,
            )
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    for name in WEIGHT_FILES:
        if (path := Path(lora_dir) / name).is_file():
            return path
    raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")


def read_weights(path: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a weights file. Pickles are read with `weights_only`, so they cannot run code.

    shapes_only   read a safetensors file's header alone; the tensors are then on the "meta" device

    ValueError names the file when it is damaged, cut short, or would need to run code.
    """
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                read = _shape_of if shapes_only else safe_open.get_tensor
                return {name: read(file, name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, AttributeError) as error:  # AttributeError: a dtype torch does not have
            raise ValueError(f"'{path}' is not a readable safetensors file: {error}") from error
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes can raise anything; nothing of it may run
        raise ValueError(f"'{path}' is damaged or holds more than plain tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ValueError(f"'{path}' does not hold a dict of tensors")
    return tensors


def _shape_of(file: safe_open, name: str) -> torch.Tensor:
    entry = file.get_slice(name)
    dtype = torch.float32 if "F" in entry.get_dtype() else torch.int64
    return torch.empty(entry.get_shape(), dtype=dtype, device="meta")


def _is_skipped(module: str, skip_prefixes: list[str]) -> bool:
    return any(module.startswith(prefix) or f".{prefix}" in module for prefix in skip_prefixes)


def _refuse_unexpected(
    lora_dir: str,
    tensors: dict[str, torch.Tensor],
    expected: list[str],
    weights_mapper: WeightsMapper | None,
    skip_prefixes: list[str],
) -> None:
    """An adapter trained for another model must not load in silence and serve the base model."""
    modules = {
        parse_fine_tuned_lora_name(name, weights_mapper)[0]
        for name in tensors
        if not is_base_embedding_weights(name)
    }
    wanted = {module for module in modules if not _is_skipped(module, skip_prefixes)}
    if unexpected := sorted(module for module in wanted if not is_supported_lora_module(module, expected)):
        shown = ", ".join(unexpected[:8]) + (
            f" and {len(unexpected) - 8} more" if len(unexpected) > 8 else ""
        )
        raise ValueError(
            f"While loading '{lora_dir}', expected target modules in {sorted(expected)} but received {shown}. "
            "Please verify that the loaded LoRA module is correct"
        )


def _check_pair(module: str, pair: dict[bool, torch.Tensor]) -> None:
    if len(pair) < 2:
        raise ValueError(
            f"{module} has lora_{'A' if True in pair else 'B'} but not lora_{'B' if True in pair else 'A'}"
        )
    for name, tensor in (("lora_A", pair[True]), ("lora_B", pair[False])):
        if tensor.ndim != 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{module}.{name} must be a matrix of floats, got {tuple(tensor.shape)} {tensor.dtype}"
            )
        if 0 in tensor.shape:
            raise ValueError(
                f"{module}.{name} has shape {tuple(tensor.shape)}; a rank of 0 is not an adapter"
            )
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(f"{module}.{name} holds NaN or Inf")
    if pair[True].shape[0] != pair[False].shape[1]:
        raise ValueError(
            f"{module}: lora_A {tuple(pair[True].shape)} and lora_B {tuple(pair[False].shape)} differ in rank"
        )
