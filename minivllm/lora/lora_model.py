"""An adapter folder, read and checked. Stands for vllm/lora/lora_model.py (v0.22.1)."""

import io
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from minivllm.config import DTYPES
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

    id        the adapter's `lora_int_id`, >= 1
    rank      the largest rank of its modules
    loras     module name -> LoRALayerWeights
    name      what the request that loaded it called it; for people, nothing depends on it
    scaling_factor   of the rotary embedding: above 1 for an adapter trained at a longer context (`context_length`)
    load_id   a number no other load ever had. Whatever remembers results of this adapter (the prefix cache)
              uses it as the key: names and ids may come back with other weights, a load_id does not.
    pool, live_rows   for a GPU: the page-locked memory that holds all tensors, and their rows, see `SlotWriter`
    """

    def __init__(self, lora_model_id: int, rank: int, loras: dict[str, LoRALayerWeights]) -> None:
        if lora_model_id < 1:
            raise ValueError(f"a valid lora id should be greater than 0, got {lora_model_id}")
        self.id = lora_model_id
        self.rank = rank
        self.loras = loras
        self.name = ""
        self.scaling_factor = 1.0
        self.pool: torch.Tensor | None = None
        self.live_rows: list[tuple[list[int], list[int]]] = []
        self.load_id = next(_load_ids)

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """The weights of one module, None where the adapter leaves it alone."""
        return self.loras.get(module_name)

    def check_lora_name(self, lora_name: str) -> bool:
        return lora_name in self.loras

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """The same tensors under another id, and a load_id of its own."""
        twin = type(self)(lora_model_id, self.rank, self.loras.copy())
        twin.name, twin.scaling_factor = self.name, self.scaling_factor
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of all A and B."""
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

        tensors           PEFT name -> tensor; A (r, K), B (N, r), in any order. PEFT's copies of base
                          embeddings are left out
        dtype             to convert to, None = leave
        model_vocab_size  the width that the A of an embedding must have, None = any
        weights_mapper    gives the names that modules have in the model. The config's patterns know only the
                          names without it
        skip_prefixes     tensors of modules under one of these are left out

        Scaling is noted, not applied: that is `optimize`'s work.

        Raises ValueError naming the tensor or the module: a name that is not LoRA's, one side of a module there
        twice (with PEFT's prefix and without), A or B missing, shapes that do not fit together, a rank that the
        config does not give, NaN or Inf once converted; and when there are no LoRA weights at all. Most of it is
        found by `_check_tensor`, `_check_pair` and `_check_numbers`.
        """
        pairs: dict[tuple[str, str], dict[bool, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if is_base_embedding_weights(name) or _is_skipped(name, skip_prefixes or []):
                continue
            module, is_lora_a = parse_fine_tuned_lora_name(name, weights_mapper)
            trained_as, _ = parse_fine_tuned_lora_name(name)  # the config's patterns know only this name
            _check_tensor(name, tensor, model_vocab_size)
            pair = pairs.setdefault((module, trained_as), {})
            if is_lora_a in pair:
                raise ValueError(f"{name} is there twice, with and without the prefix that PEFT writes")
            pair[is_lora_a] = tensor
        if not pairs:
            raise ValueError("the adapter holds no LoRA weights")

        loras = {}
        for (module, trained_as), pair in pairs.items():
            _check_pair(module, pair, peft_helper.ranks)
            lora = LoRALayerWeights.from_config(trained_as, peft_helper, rank=len(pair[True]))
            lora.module_name = module
            lora.lora_a = pair[True].to(device=device, dtype=dtype)  # (r, K)
            lora.lora_b = pair[False].to(device=device, dtype=dtype)  # (N, r)
            _check_numbers(lora)
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
        try:
            lora = cls.from_lora_tensors(
                lora_model_id,
                tensors,
                peft_helper,
                device="meta" if shapes_only else device,
                dtype=dtype,
                model_vocab_size=model_vocab_size,
                weights_mapper=weights_mapper,
                skip_prefixes=skip_prefixes,
            )
            _refuse_unexpected(lora.loras, sorted(expected_lora_modules))
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error
        return lora


def find_weights_file(lora_dir: str) -> Path:
    """The adapter's weights in a folder, safetensors first. FileNotFoundError says what was looked for."""
    for name in WEIGHT_FILES:
        if os.path.isfile(path := os.path.join(lora_dir, name)):
            return Path(path)
    raise FileNotFoundError(f"'{lora_dir}' has no weights file ({', '.join(WEIGHT_FILES)})")


def read_weights(path: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a weights file, in the order of names.

    shapes_only   tensors on the "meta" device: of a safetensors file, only the header is read

    ValueError names the file when it cannot be read, is damaged, cut short, or would need to run code.
    """
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
    try:
        tensors = read(path, shapes_only)
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error
    return {name: tensors[name].to("meta" if shapes_only else "cpu") for name in sorted(tensors)}


def _read_safetensors(path: Path, shapes_only: bool) -> dict[str, torch.Tensor]:
    try:
        if shapes_only:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118 (no dict)
        # Not safe_open: its tensors are views of the file, so that writing over it would change the adapter that
        # is being served, and cutting it short would kill the process.
        return safetensors.torch.load(path.read_bytes())
    # All but the first: a dtype that torch does not have, or has no way to fill.
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"'{path}' is not a readable safetensors file: {error}") from error


def _read_pickle(path: Path, shapes_only: bool) -> dict[str, torch.Tensor]:
    """With `weights_only`, so that nothing in the file can run. All of it is read, also for the shapes."""
    data = io.BytesIO(path.read_bytes())
    try:
        tensors = torch.load(data, map_location="cpu", weights_only=True)
    # Damaged bytes can raise anything. torch's own text is left out: it tells how to load the file regardless.
    except Exception as error:
        raise ValueError(
            f"'{path}' is damaged or holds more than plain tensors; save the adapter as safetensors"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(f"'{path}' does not hold a dict of tensors by name; save the adapter as safetensors")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not _is_plain(tensor):
            raise ValueError(f"'{path}': {name} is not a plain tensor; save the adapter as safetensors")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Dense numbers, all of them in the file: a pickle can also hold views larger than what they show."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
    )


def _is_skipped(name: str, skip_prefixes: list[str]) -> bool:
    """Whether a tensor's module is under one of the prefixes, with PEFT's own prefix or without."""
    return any(name.startswith(prefix) or f".{prefix}" in name for prefix in skip_prefixes)


def _refuse_unexpected(modules: Iterable[str], expected: list[str]) -> None:
    """An adapter trained for another model must not load in silence and serve the base model."""
    unexpected = sorted(name for name in modules if not is_supported_lora_module(name, expected))
    if unexpected:
        more = f" and {len(unexpected) - 8} more" if len(unexpected) > 8 else ""
        raise ValueError(
            f"expected target modules in {expected} but received {', '.join(unexpected[:8])}{more}. "
            "Please verify that the loaded LoRA module is correct"
        )


def _check_tensor(name: str, tensor: torch.Tensor, vocab_size: int | None) -> None:
    shape = tuple(tensor.shape)
    if tensor.ndim != 2 or 0 in shape:
        raise ValueError(f"{name} must be a matrix of at least rank 1, got shape {shape}")
    if tensor.dtype not in DTYPES.values():
        names = sorted({str(dtype).removeprefix("torch.") for dtype in DTYPES.values()})
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(names)}")
    if name.endswith(".lora_embedding_A") and vocab_size not in (None, shape[1]):
        raise ValueError(f"{name} has shape {shape}, but the model's vocabulary has {vocab_size} tokens")


def _check_pair(module: str, pair: dict[bool, torch.Tensor], ranks: list[int]) -> None:
    if len(pair) < 2:
        there, missing = ("lora_A", "lora_B") if True in pair else ("lora_B", "lora_A")
        raise ValueError(f"{module} has {there} but not {missing}")
    (rank, _), (_, rank_of_b) = pair[True].shape, pair[False].shape
    if rank != rank_of_b:
        raise ValueError(
            f"{module}: lora_A {tuple(pair[True].shape)} and lora_B {tuple(pair[False].shape)} differ in rank"
        )
    if rank not in ranks:
        raise ValueError(
            f"{module} has rank {rank}, but adapter_config.json gives only {ranks} (r and rank_pattern), "
            "so its scaling is unknown"
        )


def _check_numbers(lora: LoRALayerWeights) -> None:
    """ValueError for NaN or Inf, also for what becomes Inf in this dtype or when B is scaled."""
    for side, tensor, factor in (("A", lora.lora_a, 1), ("B", lora.lora_b, lora.scaling)):
        if tensor.is_meta:
            continue
        # One pass; NaN comes through both ends, and is not <= anything.
        smallest, largest = (end.item() for end in torch.aminmax(tensor))
        if not max(-smallest, largest) * abs(factor) <= torch.finfo(tensor.dtype).max:
            raise ValueError(f"{lora.module_name}.lora_{side} holds NaN or Inf as {tensor.dtype}")
