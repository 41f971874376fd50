"""One adapter: whose its tensors are, and all that fits together. Stands for vllm/lora/lora_model.py (v0.22.1)."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from minivllm.lora.checks import check_modules, check_numbers, check_pair, check_tensor
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.limits import MOST_TENSORS
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import WeightsMapper, is_left_out, parse_fine_tuned_lora_name
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.weights_files import find_weights_file, read_weights

# Name in the model, name in training -> "lora_A", "lora_B", and what the adapter has beside them, such as "bias".
Pairs = dict[tuple[str, str], dict[str, torch.Tensor]]

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
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for option in peft_helper.extensions.options:
            for kind in option.kept_beside if peft_helper.config.get(option.config_field) else ():
                for (module, _), pair in pairs.items():
                    if pair.keys() >= {"lora_A", "lora_B", kind}:
                        kept.setdefault(module, {})[kind] = pair.pop(kind)
        loras = to_weights(pairs, peft_helper, device, dtype)
        for module, beside in kept.items():
            loras[module].beside |= beside
        model = cls(lora_model_id, max(lora.rank for lora in loras.values()), loras)
        model.beside = dict(peft_helper.beside)
        return model

    @classmethod
    def from_local_checkpoint(
        cls,
        lora_dir: str,
        expected_lora_modules: Iterable[str] | None,
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

        None: the caller checks later whether the adapter fits, as an engine's `WrappedModules.judge` does.

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
        vocab_size = None if extensions.files_in(lora_dir) else model_vocab_size
        try:
            lora = cls.from_lora_tensors(
                lora_model_id, tensors, peft_helper, device, dtype, vocab_size, weights_mapper, skip_prefixes
            )
            if expected_lora_modules is not None:
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
    for option, file in extensions.files_in(lora_dir):
        found = read_weights(file, shapes_only, formats=extensions.file_formats)
        option.read_file(str(file), found, lora, device, dtype)


def read_tensor(
    name: str, tensor: torch.Tensor, peft_helper: PEFTHelper
) -> tuple[str, str | None, torch.Tensor]:
    """What a tensor is: (name, kind, tensor).

    name   of an A or a B, as `parse_fine_tuned_lora_name` reads it
    kind   None for A and B themselves; "bias", say, for what belongs beside that B

    An option that knows such names (`tensor_marks`) may give a tensor another name or shape. All else stays as it is.
    """
    for option in peft_helper.extensions.options:
        for mark in option.tensor_marks:
            if mark in name:
                return option.read_tensor(name, tensor, peft_helper)
    return name, None, tensor


# region lab 1.6: from tensors to modules
def pair_up(
    tensors: dict[str, torch.Tensor],
    peft_helper: PEFTHelper,
    vocab_size: int | None = None,
    weights_mapper: WeightsMapper | None = None,
    skip_prefixes: list[str] | None = None,
) -> Pairs:
    """The A and B of every module together, and what else belongs to them.

    The keys are (name in the model, name in training), because layers go by the first and the patterns of the config
    by the second. Under each are "lora_A", "lora_B", and what options read, such as a bias on B, by its kind. One of
    them may be missing: `to_weights` judges pairs.

    tensors          PEFT name -> tensor; A (r, K), B (N, r), in any order. Those of `is_left_out` are not the adapter's
    vocab_size       the width that the A of an embedding must have, None = any
    weights_mapper   gives the model's names of modules; None where the checkpoint has the same

    By hand, with a mapper that calls mlp.fc what was mlp.up in training, and biases on B:

        base_model.model.mlp.up.lora_B.weight   (5, 2)
        base_model.model.mlp.up.lora_A.weight   (2, 3)
        base_model.model.mlp.up.lora_B.bias     (5,)

    become {("mlp.fc", "mlp.up"): {"lora_B": (5, 2), "lora_A": (2, 3), "bias": (1, 5)}}.

    ValueError names a tensor whose name is not LoRA's, one that `check_tensor` refuses, and one that is there twice
    (with PEFT's prefix and without). It is raised, too, when there are no LoRA weights at all. A tensor for which
    `read_tensor` gives another one is not checked here, because the option that made it has checked it.
    """
    pairs: Pairs = {}
    for name, tensor in tensors.items():
        if is_left_out(name, skip_prefixes):
            continue
        plain_name, kind, read = read_tensor(name, tensor, peft_helper)
        module, is_lora_a = parse_fine_tuned_lora_name(plain_name, weights_mapper)
        trained_as, _ = parse_fine_tuned_lora_name(plain_name)
        if read is tensor:
            check_tensor(name, tensor, vocab_size)
        side = kind or ("lora_A" if is_lora_a else "lora_B")
        pair = pairs.setdefault((module, trained_as), {})
        if side in pair:
            raise ValueError(f"{name} is there twice, with and without the prefix that PEFT writes")
        pair[side] = read
    if not pairs:
        raise ValueError("the adapter holds no LoRA weights")
    return pairs


def to_weights(
    pairs: Pairs,
    peft_helper: PEFTHelper,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, LoRALayerWeights]:
    """Module of the model -> its weights. Ranks are the tensors' own, scalings the config's.

    A pair of E experts has A (E, r, K) and B (E, N, r); its rank is r. Tensors are converted to `device` and `dtype`
    (None = as stored), and none of them before all modules have been judged, so that a refusal costs no memory. Tensors
    on "meta" are shapes alone: they stay there, and have no numbers to judge.

    A and B come unscaled, with the scaling noted beside them, because `optimize` folds it into B later. Nobody scales
    later what goes into `beside`, so it is scaled here, after its conversion to `dtype`. By hand, with a scaling of 3
    and float32 asked for: a bias stored in bfloat16 as 1.0078125 becomes 3.0234375. Scaled before the conversion it
    would be 3.03125, which is not PEFT's.

    ValueError names a module that two names in training stand for, shapes and ranks that `check_pair` refuses, and
    numbers that `check_numbers` refuses.
    """
    loras: dict[str, LoRALayerWeights] = {}
    for (module, trained_as), pair in pairs.items():
        if module in loras:
            raise ValueError(f"{module} is there twice: {trained_as} is a second name for it")
        check_pair(module, pair, peft_helper.ranks)
        lora = LoRALayerWeights.from_config(trained_as, peft_helper, rank=pair["lora_A"].shape[-2])
        if not pair["lora_A"].is_meta:
            check_numbers(module, pair, lora.scaling, dtype)
        lora.module_name = module
        lora.lora_a, lora.lora_b = pair.pop("lora_A"), pair.pop("lora_B")  # (r, K), (N, r)
        lora.beside = pair  # (1, N)
        loras[module] = lora
    convert = partial(torch.Tensor.to, device=device, dtype=dtype)
    for lora in loras.values():
        if not lora.lora_a.is_meta:
            lora.replace_tensors(convert)
        lora.beside = {kind: tensor * lora.scaling for kind, tensor in lora.beside.items()}
    return loras


# endregion


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors keep allocated: each piece of memory once, all of it, however many views of it there are."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})
