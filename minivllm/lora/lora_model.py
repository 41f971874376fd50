"""One adapter, read and checked. Stands for vllm/lora/lora_model.py (v0.22.1)."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from minivllm.lora.adapter_tensors import pair_up, to_weights
from minivllm.lora.checks import check_modules
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.limits import MOST_TENSORS
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import WeightsMapper, is_left_out
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.weights_files import files_in, find_weights_file, read_weights

_load_ids = itertools.count(1)


class LoRAModel:
    """All of one adapter: its weights by module name. vLLM: `LoRAModel`.

    id        the adapter's `lora_int_id`, >= 1
    rank      the largest rank of its modules
    loras     module name -> its weights
    name      what the request that loaded it called it; for people, nothing depends on it
    beside    what options found of the whole adapter, by their names for it; {} for a plain one
    is_accepted   whether its weights have the form in which slots take them (`WrappedModules.accept`)
    load_id   a number that no other load ever had: the key of whatever remembers results, such as the prefix cache.
              Names and ids may come back with other weights. A load_id does not.
    load_seconds   how long it took to read
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
        self.load_seconds = 0.0

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """The weights of one module, None where the adapter leaves it alone."""
        return self.loras.get(module_name)

    def check_lora_name(self, lora_name: str) -> bool:
        """Whether the adapter has weights for a module. vLLM: the same name."""
        return lora_name in self.loras

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """The same tensors under another id, and a load_id of its own. vLLM: the same name."""
        twin = type(self)(lora_model_id, self.rank, self.loras.copy())
        twin.name, twin.beside, twin.is_accepted = self.name, self.beside.copy(), self.is_accepted
        return twin

    @property
    def tensors(self) -> list[torch.Tensor]:
        """A, B and what comes beside them, of all modules."""
        return [tensor for weights in self.loras.values() for tensor in weights.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors keep; an A that parts of a fused module share counts once."""
        return storage_bytes(self.tensors)

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
        """From tensors by PEFT's names. Ranks are the tensors' own, scaling is the config's, noted and not applied.

        All is judged before anything is converted: a refusal costs no memory. For parameters and errors see `pair_up`
        and `to_weights`. vLLM: the same name.
        """
        pairs = pair_up(tensors, peft_helper, model_vocab_size, weights_mapper, skip_prefixes)
        loras = to_weights(pairs, peft_helper, device, dtype)
        model = cls(lora_model_id, max(lora.rank for lora in loras.values()), loras)
        model.beside = dict(peft_helper.beside)
        return model

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
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> "LoRAModel":
        """From an adapter folder; `expected_lora_modules` are the names (or ends of names) the model has.

        With `shapes_only` the weights are not read: enough to check an adapter, not to serve it. A file of more than
        `most_tensors` is refused before any of them is looked at.

        tensors   of the weights file, or their shapes, where somebody has read them

        FileNotFoundError: no weights file. ValueError names a file that is damaged, modules that the model does not
        have, or what `from_lora_tensors` refuses. vLLM: the same name.
        """
        extensions, path = peft_helper.extensions, find_weights_file(lora_dir)
        if tensors is None:
            left_out = partial(is_left_out, skip_prefixes=skip_prefixes)
            tensors = read_weights(path, shapes_only, left_out, most_tensors, extensions.file_formats)
        if shapes_only:
            device = "meta"
            tensors = {n: tensor if tensor.is_meta else tensor.to("meta") for n, tensor in tensors.items()}
        # Where an option reads a file it may add tokens, which A may know of.
        vocab_size = None if files_in(lora_dir, extensions.files) else model_vocab_size
        try:
            lora = cls.from_lora_tensors(
                lora_model_id, tensors, peft_helper, device, dtype, vocab_size, weights_mapper, skip_prefixes
            )
            check_modules(lora.loras, sorted(expected_lora_modules))
        except ValueError as error:
            raise ValueError(f"'{path}': {error}") from error
        read_option_files(lora, lora_dir, extensions, shapes_only, device, dtype)
        return lora


def read_option_files(
    lora: LoRAModel,
    lora_dir: str,
    extensions: LoRAExtensions,
    shapes_only: bool,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Have each option put beside an adapter what the file says that it adds to the folder. ValueError names it."""
    for option in extensions.options:
        for file in files_in(lora_dir, option.files)[:1]:
            found = read_weights(file, shapes_only, formats=extensions.file_formats)
            option.read_file(str(file), found, lora, device, dtype)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors keep allocated: each piece of memory once, all of it, however many views of it there are."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
