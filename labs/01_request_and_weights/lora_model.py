"""An adapter folder, read and checked. Stands for vllm/lora/lora_model.py (v0.22.1)."""

from minivllm.labs import Todo
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from minivllm.config import DTYPES
from minivllm.lora.limits import MOST_TENSORS
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import (
    WeightsMapper,
    dotted_ends,
    is_base_embedding_weights,
    parse_fine_tuned_lora_name,
)
from minivllm.lora.new_embeddings import convert_new_embeddings, count_added_tokens, read_new_embeddings
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.storage import storage_bytes
from minivllm.lora.target_parameters import is_unfolded, unfold_target_parameters
from minivllm.lora.weights_files import find_weights_file, read_weights

_load_ids = itertools.count(1)

BIAS_OF_B = ".lora_B.bias"


class LoRAModel:
    """All of one adapter: its weights by module name. vLLM: `LoRAModel`.

    id        the adapter's `lora_int_id`, >= 1
    rank      the largest rank of its modules
    loras     module name -> LoRALayerWeights
    beside    what options found of the whole adapter; {} for a plain one. `added_tokens`: how many tokens it adds to
              the vocabulary, `new_embeddings`: theirs. `scaling_factor`: of the rotary embedding, above 1 for an
              adapter trained at a longer context (`context_length`)
    is_accepted   whether its weights have the form in which slots take them (`WrappedModules.accept`)
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
        self.beside: dict[str, Any] = {}
        self.is_accepted = False
        self.load_id = next(_load_ids)

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """The weights of one module, None where the adapter leaves it alone."""
        return self.loras.get(module_name)

    def check_lora_name(self, lora_name: str) -> bool:
        return lora_name in self.loras

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """The same tensors under another id, and a load_id of its own."""
        twin = type(self)(lora_model_id, self.rank, self.loras.copy())
        twin.name, twin.beside, twin.is_accepted = self.name, self.beside.copy(), self.is_accepted
        return twin

    @property
    def added_tokens(self) -> int:
        return self.beside.get("added_tokens", 0)

    @property
    def scaling_factor(self) -> float:
        return self.beside.get("scaling_factor", 1.0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """A, B and what comes with them, of all modules."""
        return [tensor for lora in self.loras.values() for tensor in lora.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors keep; an A that parts of a fused module share counts once."""
        return storage_bytes(self.tensors)

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
                          embeddings are left out. Those of `target_parameters` are unfolded first, by
                          `unfold_target_parameters`: A (E, r, K), B (E, N, r) of E experts
        dtype             to convert to, None = leave
        model_vocab_size  the width that the A of an embedding must have, None = any
        weights_mapper    gives the names that modules have in the model. The config's patterns know only the
                          names without it
        skip_prefixes     tensors of modules under one of these are left out

        Scaling is noted, not applied: that is `optimize`'s work. Biases on B (`lora_bias`) are no tensors of a pair:
        `_split_off_biases` takes them out before, `_add_biases` gives them to the modules at the end.

        All is judged before anything is converted, so that a refusal costs no memory.

        Raises ValueError naming the tensor or the module: a name that is not LoRA's, one side of a module there
        twice (with PEFT's prefix and without), a module there under two names that the mapper makes one, A or B
        missing, shapes that do not fit together, a rank that the config does not give, NaN or Inf once converted;
        and when there are no LoRA weights at all. Most of it is found by `_check_tensor`, `_check_pair` and
        `_check_numbers`.
        """
        raise Todo("lab 1.6: from tensors to modules")

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
        most_tensors: int = MOST_TENSORS,
    ) -> "LoRAModel":
        """From an adapter folder; `expected_lora_modules` are the names (or ends of names) the model has.
        With `shapes_only` the weights are not read: enough to check an adapter, not to serve it. A file of more than
        `most_tensors` is refused before any of them is looked at.

        Raises FileNotFoundError when there is no weights file, ValueError when it is damaged, names modules
        the model does not have, or fails the checks of `from_lora_tensors`. vLLM: the same name.
        """

        def is_wanted(name: str) -> bool:
            return not is_base_embedding_weights(name) and not _is_skipped(name, skip_prefixes or [])

        path = find_weights_file(lora_dir)
        tensors = read_weights(path, shapes_only, is_wanted, most_tensors)
        added = read_new_embeddings(lora_dir, shapes_only)
        device = "meta" if shapes_only else device
        try:
            lora = cls.from_lora_tensors(
                lora_model_id,
                tensors,
                peft_helper,
                device=device,
                dtype=dtype,
                # Where tokens are added, A may know of them: the model's own check of shapes knows, too.
                model_vocab_size=None if added else model_vocab_size,
                weights_mapper=weights_mapper,
                skip_prefixes=skip_prefixes,
            )
            _refuse_unexpected(lora.loras, sorted(expected_lora_modules))
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error
        if added:
            converted = convert_new_embeddings(added, lambda t: t.to(device=device, dtype=dtype))
            lora.beside |= {"added_tokens": count_added_tokens(added), "new_embeddings": converted}
        return lora


def _is_skipped(name: str, skip_prefixes: list[str]) -> bool:
    """Whether a tensor's module is under one of the prefixes, with PEFT's own prefix or without."""
    return any(name.startswith(prefix) or f".{prefix}" in name for prefix in skip_prefixes)


def _split_off_biases(
    tensors: dict[str, torch.Tensor],
    peft_helper: PEFTHelper,
    weights_mapper: WeightsMapper | None,
    skip_prefixes: list[str] | None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors without those of `lora_bias`, which come as (N,), by module name.

    Where the config does not say `lora_bias` they stay, to be refused as no LoRA weights.
    """
    if not peft_helper.lora_bias:
        return tensors, {}
    pairs, biases = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(BIAS_OF_B):
            pairs[name] = tensor
        elif not _is_skipped(name, skip_prefixes or []):
            module, _ = parse_fine_tuned_lora_name(f"{name.removesuffix('bias')}weight", weights_mapper)
            if tensor.ndim != 1 or tensor.dtype not in DTYPES.values() or module in biases:
                raise ValueError(
                    f"{name} must be one vector of floats, got shape {tuple(tensor.shape)} of {tensor.dtype}"
                    + (", and is there twice" if module in biases else "")
                )
            biases[module] = tensor
    return pairs, biases


def _add_biases(
    loras: dict[str, LoRALayerWeights], biases: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Give each module its bias. ValueError that names one without A and B, of another width, with NaN or Inf."""
    for module, bias in biases.items():
        if module not in loras:
            raise ValueError(f"{module} has lora_B.bias but not lora_A and lora_B")
        lora = loras[module]
        if len(bias) != lora.output_dim:
            raise ValueError(f"{module} has lora_B.bias {tuple(bias.shape)}, expected ({lora.output_dim},)")
        _check_finite(f"{module}.lora_B.bias", bias, lora.scaling, dtype)
        lora.beside["bias"] = bias[None] * lora.scaling  # (1, N)


def _refuse_unexpected(modules: Iterable[str], expected: list[str]) -> None:
    """An adapter trained for another model must not load in silence and serve the base model."""
    ends = frozenset(expected)  # `is_supported_lora_module`, at once for all: experts have hundreds of ends
    unexpected = sorted(name for name in modules if ends.isdisjoint(dotted_ends(name)))
    if unexpected:
        more = f" and {len(unexpected) - 8} more" if len(unexpected) > 8 else ""
        raise ValueError(
            f"expected target modules in {expected} but received {', '.join(unexpected[:8])}{more}. "
            "Please verify that the loaded LoRA module is correct"
        )


def _check_tensor(name: str, tensor: torch.Tensor, vocab_size: int | None) -> None:
    shape = tuple(tensor.shape)
    if tensor.ndim != (3 if is_unfolded(name) else 2) or 0 in shape:
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
    (*experts, rank, _), (*experts_of_b, _, rank_of_b) = pair[True].shape, pair[False].shape
    if (experts, rank) != (experts_of_b, rank_of_b):
        raise ValueError(
            f"{module}: lora_A {tuple(pair[True].shape)} and lora_B {tuple(pair[False].shape)} differ in rank"
            + (" or in experts" if experts else "")
        )
    if rank not in ranks:
        raise ValueError(
            f"{module} has rank {rank}, but adapter_config.json gives only {ranks} (r and rank_pattern), "
            "so its scaling is unknown"
        )


def _check_numbers(lora: LoRALayerWeights, dtype: torch.dtype | None) -> None:
    """ValueError for NaN or Inf, also for what becomes Inf in this dtype (None: its own) or when B is scaled."""
    _check_finite(f"{lora.module_name}.lora_A", lora.lora_a, 1, dtype)
    _check_finite(f"{lora.module_name}.lora_B", lora.lora_b, lora.scaling, dtype)


def _check_finite(name: str, tensor: torch.Tensor, factor: float, dtype: torch.dtype | None) -> None:
    if tensor.is_meta:
        return
    dtype = dtype or tensor.dtype
    # One pass; NaN comes through both ends, and is not <= anything. No number between them is larger once rounded.
    ends = torch.aminmax(tensor)
    smallest, largest = (end.item() if end.dtype == dtype else end.to(dtype).item() for end in ends)
    if not max(-smallest, largest) * abs(factor) <= torch.finfo(dtype).max:
        raise ValueError(f"{name} holds NaN or Inf as {dtype}")
