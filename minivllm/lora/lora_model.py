"""One adapter, read and checked. Stands for vllm/lora/lora_model.py (v0.22.1)."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from minivllm.lora import seams
from minivllm.lora.checks import check_modules, check_numbers, check_pair, check_tensor
from minivllm.lora.limits import MOST_TENSORS
from minivllm.lora.module_weights import LoRALayerWeights
from minivllm.lora.names import WeightsMapper, is_base_embedding_weights, parse_fine_tuned_lora_name
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.weights_files import files_of_options, find_weights_file, read_weights

_load_ids = itertools.count(1)

# Name in the model, name in training -> "lora_A", "lora_B" and what options read beside B, such as "lora_B.bias".
Pairs = dict[tuple[str, str], dict[str, torch.Tensor]]


class LoRAModel:
    """All of one adapter: its weights by module name. vLLM: `LoRAModel`.

    id        the adapter's `lora_int_id`, >= 1
    rank      the largest rank of its modules
    loras     module name -> its weights
    name      what the request that loaded it called it; for people, nothing depends on it
    beside    what options found of the whole adapter, by their names for it; {} for a plain one
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
        self.load_id = next(_load_ids)

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """The weights of one module, None where the adapter leaves it alone."""
        return self.loras.get(module_name)

    def check_lora_name(self, lora_name: str) -> bool:
        return lora_name in self.loras

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """The same tensors under another id, and a load_id of its own."""
        twin = type(self)(lora_model_id, self.rank, self.loras.copy())
        twin.name, twin.beside = self.name, self.beside.copy()
        return twin

    @property
    def tensors(self) -> list[torch.Tensor]:
        """A, B and what comes beside them, of all modules."""
        return [tensor for lora in self.loras.values() for tensor in lora.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors keep; an A that parts of a fused module share counts once."""
        storages = {tensor.untyped_storage() for tensor in self.tensors}
        return sum(storage.nbytes() for storage in storages)

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

        tensors           PEFT name -> tensor; A (r, K), B (N, r), in any order
        dtype             to convert to, None = leave
        model_vocab_size  the width that the A of an embedding must have, None = any
        weights_mapper    gives the names that modules have in the model. The config's patterns know only the
                          names without it
        skip_prefixes     tensors of modules under one of these are left out, and so are PEFT's copies of embeddings

        Scaling is noted, not applied: that is `optimize`'s work. What options read beside B is kept by its
        name, times the scaling. All is judged before anything is converted: a refusal costs no memory.

        Raises ValueError naming the tensor or the module: a name that is not LoRA's, one side of a module there
        twice (with PEFT's prefix and without), a module there under two names that the mapper makes one; and when
        there are no LoRA weights at all. `check_pair` and `check_numbers` find the rest.
        """
        pairs = cls._pair_up(tensors, peft_helper, model_vocab_size, weights_mapper, skip_prefixes)
        loras: dict[str, LoRALayerWeights] = {}
        for (module, trained_as), pair in pairs.items():
            if module in loras:
                raise ValueError(f"{module} is there twice: {trained_as} is a second name for it")
            check_pair(module, pair, peft_helper.ranks)
            lora = LoRALayerWeights.from_config(trained_as, peft_helper, rank=pair["lora_A"].shape[-2])
            check_numbers(module, pair, lora.scaling, dtype)
            lora.module_name = module
            lora.lora_a = pair.pop("lora_A")  # (r, K)
            lora.lora_b = pair.pop("lora_B")  # (N, r)
            lora.beside = {side: tensor * lora.scaling for side, tensor in pair.items()}
            loras[module] = lora
        for lora in loras.values():
            lora.replace_tensors(lambda tensor: tensor.to(device=device, dtype=dtype))
        model = cls(lora_model_id, max(lora.rank for lora in loras.values()), loras)
        model.beside = dict(peft_helper.beside)
        return model

    @staticmethod
    def _pair_up(
        tensors: dict[str, torch.Tensor],
        peft_helper: PEFTHelper,
        vocab_size: int | None,
        weights_mapper: WeightsMapper | None,
        skip_prefixes: list[str] | None,
    ) -> Pairs:
        """The tensors of each module together, those of `is_left_out` left out.

        `_read` checks a tensor, and says what it is to its module if it is neither A nor B.
        """
        pairs: Pairs = {}
        for name, tensor in tensors.items():
            if is_left_out(name, skip_prefixes):
                continue
            plain_name, side, tensor = _read(name, tensor, peft_helper, vocab_size)
            module, is_lora_a = parse_fine_tuned_lora_name(plain_name, weights_mapper)
            trained_as, _ = parse_fine_tuned_lora_name(plain_name)  # the config's patterns know only this name
            side = side or ("lora_A" if is_lora_a else "lora_B")
            pair = pairs.setdefault((module, trained_as), {})
            if side in pair:
                raise ValueError(f"{name} is there twice, with and without the prefix that PEFT writes")
            pair[side] = tensor
        if not pairs:
            raise ValueError("the adapter holds no LoRA weights")
        return pairs

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
        path, of_options = find_weights_file(lora_dir), files_of_options(lora_dir)
        tensors = read_weights(
            path, shapes_only, lambda name: not is_left_out(name, skip_prefixes), most_tensors
        )
        device = "meta" if shapes_only else device
        # Where an option reads a file it may add tokens, which A may know of.
        vocab_size = None if of_options else model_vocab_size
        try:
            lora = cls.from_lora_tensors(
                lora_model_id, tensors, peft_helper, device, dtype, vocab_size, weights_mapper, skip_prefixes
            )
            check_modules(lora.loras, sorted(expected_lora_modules))
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error
        for name, file in of_options.items():
            seams.folder_files[name](file, lora, device, dtype)
        return lora


def is_left_out(name: str, skip_prefixes: list[str] | None) -> bool:
    """Whether a tensor is none of the adapter's: PEFT's copy of an embedding, or of a module under a skipped prefix."""
    if is_base_embedding_weights(name):
        return True
    return any(name.startswith(prefix) or f".{prefix}" in name for prefix in skip_prefixes or ())


def _read(
    name: str, tensor: torch.Tensor, peft_helper: PEFTHelper, vocab_size: int | None
) -> tuple[str, str | None, torch.Tensor]:
    """The name of an A or B, what the tensor is if it is neither, and the tensor.

    What no reader (`seams.tensor_readers`) is for must be a matrix of floats: ValueError names it.
    """
    for mark, read in seams.tensor_readers.items():
        if mark in name:
            return read(name, tensor, peft_helper)
    check_tensor(name, tensor, vocab_size)
    return name, None, tensor
