"""Tokens that an adapter adds to the vocabulary. Stands for the extra vocabulary of vllm/lora/lora_model.py.

vLLM had it up to 0.10 and has dropped it (v0.22.1): there a base model is retrained for new tokens. Beside its
weights an adapter has a file `new_embeddings.safetensors` with

    input_embeddings    (n, H) read by the model for ids V .. V + n - 1
    output_embeddings   (n, H) what these tokens' logits are made with
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from minivllm.config import DTYPES
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.weights_files import find_new_embeddings_file, read_weights

if TYPE_CHECKING:
    from minivllm.lora.layers import BaseLayerWithLoRA
    from minivllm.lora.lora_model import LoRAModel

INPUT, OUTPUT = "input_embeddings", "output_embeddings"


def read_new_embeddings(lora_dir: str, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's `new_embeddings` file, by their two names; {} where there is no file.

    ValueError names the file for one that cannot be read, for other names, shapes or dtypes, and where the two
    differ in their number of tokens.
    """
    path = find_new_embeddings_file(lora_dir)
    if path is None:
        return {}
    tensors = read_weights(path, shapes_only)
    if unknown := sorted(tensors.keys() - {INPUT, OUTPUT}):
        raise ValueError(f"'{path}' holds {', '.join(unknown[:4])}; only {INPUT} and {OUTPUT} are read")
    if INPUT not in tensors:
        raise ValueError(f"'{path}' has no {INPUT}; without them the added tokens cannot be read")
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or 0 in tensor.shape or tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"'{path}': {name} must be floats of shape (tokens, hidden size), got {tuple(tensor.shape)} "
                f"of {tensor.dtype}"
            )
    if len({len(tensor) for tensor in tensors.values()}) > 1:
        raise ValueError(
            f"'{path}' has {len(tensors[INPUT])} {INPUT} but {len(tensors[OUTPUT])} {OUTPUT}; "
            "give both for every added token, or no output_embeddings at all"
        )
    return tensors


def count_added_tokens(tensors: dict[str, torch.Tensor]) -> int:
    """How many tokens new embeddings are for."""
    return max(map(len, tensors.values()), default=0)


def convert_new_embeddings(
    tensors: dict[str, torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors in the adapter's dtype. ValueError that names one with NaN, or Inf once converted."""
    converted = {name: convert(tensor) for name, tensor in tensors.items()}
    for name, tensor in converted.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise ValueError(f"{name} of the added tokens hold NaN or Inf as {tensor.dtype}")
    return converted


class Vocabulary:
    """The wrapped ends of a model, where adapters may add tokens.

    modules      module name -> wrapped layer, of all that is wrapped
    kinds        ends of names of embeddings -> INPUT or OUTPUT, the model's `embedding_modules`
    is_tied      whether the model reads and writes tokens with the same embeddings
    extra        the most tokens that an adapter may add
    """

    def __init__(
        self, modules: dict[str, "BaseLayerWithLoRA"], kinds: dict[str, str], is_tied: bool, extra: int
    ) -> None:
        self.ends: dict[str, dict[str, BaseLayerWithLoRA]] = {INPUT: {}, OUTPUT: {}}
        for name, layer in modules.items():
            if (kind := kinds.get(name.rpartition(".")[2])) in self.ends:
                self.ends[kind][name] = layer
        self.is_tied = is_tied
        self.extra = extra

    def conform(self, lora: "LoRAModel") -> None:
        """Give an adapter's new embeddings to the modules they are of, and its A and B the slots' vocabulary; once.

        A module that the adapter leaves alone otherwise gets A and B of rank 0. A tied model uses the input
        embeddings for the output, too, where there are no others. ValueError when the adapter adds more tokens than
        there is room for, and where embeddings, A or B do not fit the model.
        """
        if lora.added_tokens > self.extra:
            raise ValueError(
                f"the adapter adds {lora.added_tokens} tokens, but lora_extra_vocab_size is {self.extra}; "
                f"pass --lora-extra-vocab-size {lora.added_tokens}"
            )
        if not self.extra or lora.has_slots_vocabulary:
            return
        new = lora.new_embeddings
        if self.is_tied and new:
            new = {OUTPUT: new[INPUT], **new}
        for kind, layers in self.ends.items():
            for name, layer in layers.items():
                if name in lora.loras:
                    self._fill_up(kind, layer, lora.loras[name], lora.added_tokens)
        for kind, embeddings in new.items():
            self._attach(lora, kind, embeddings)
        lora.new_embeddings, lora.has_slots_vocabulary = {}, True

    def _attach(self, lora: "LoRAModel", kind: str, embeddings: torch.Tensor) -> None:
        if not self.ends[kind]:
            raise ValueError(
                f"the adapter adds {len(embeddings)} tokens, but the engine's target_modules leave out the module of "
                f"their {kind}; add it, or leave target_modules away"
            )
        for name, layer in self.ends[kind].items():
            if embeddings.shape[1] != (width := layer.extra_slots[0].shape[2]):
                raise ValueError(
                    f"{kind} of the added tokens have shape {tuple(embeddings.shape)}, but the model's hidden size is "
                    f"{width}"
                )
            if name not in lora.loras:
                inputs, outputs = layer.part_shape(0)
                lora_a, lora_b = embeddings.new_empty(0, inputs), embeddings.new_empty(outputs, 0)
                lora.loras[name] = LoRALayerWeights(name, 0, 0, lora_a, lora_b, scaling=1)
            lora.loras[name].beside["embeddings"] = embeddings

    def _fill_up(
        self, kind: str, layer: "BaseLayerWithLoRA", weights: LoRALayerWeights, added_tokens: int
    ) -> None:
        """Zeros for what A (of an output embedding B) lacks of V + X tokens: it may know of the added ones or not."""
        size = layer.part_shape(0)[0 if kind == INPUT else 1]  # V + X
        known = sorted({size - self.extra, size - self.extra + added_tokens})
        found = weights.input_dim if kind == INPUT else weights.output_dim
        if found not in known:
            raise ValueError(
                f"{weights.module_name} has lora_A {tuple(weights.lora_a.shape)} and lora_B "
                f"{tuple(weights.lora_b.shape)}, but the vocabulary has {' or '.join(map(str, known))} tokens"
            )
        if kind == INPUT:
            weights.lora_a = F.pad(weights.lora_a, (0, size - found))  # (r, V + X)
        else:
            weights.lora_b = F.pad(weights.lora_b, (0, 0, 0, size - found))  # (V + X, r)
