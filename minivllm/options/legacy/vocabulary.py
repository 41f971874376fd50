"""Tokens that adapters add, on their way into the two ends of a model.

Stands for the extra vocabulary of vllm/lora/layers, which vLLM had up to 0.10 and has dropped (v0.22.1).
"""

from copy import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.config import LoRAConfig
from minivllm.lora.checks import NeedsOption
from minivllm.lora.extensions import AdapterOption, WrappedOption
from minivllm.lora.layers.base import BaseLayerWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.wrapping import Found, WrappedModules
from minivllm.options.legacy.new_embeddings import FILES, INPUT, OUTPUT, check_new_embeddings, put_beside
from minivllm.options.legacy.tokenizers import TokenizerFile

# Under this name weights, and slots, have the embeddings of added tokens beside A and B.
EMBEDDINGS = "embeddings"
# Under this one a head has which of X tokens they are: 1 each.
IS_ADDED = "is_added"


def pad_to_slots(weights: LoRALayerWeights, side: str, vocab_size: int, size: int) -> LoRALayerWeights:
    """Zeros for what A (of an output embedding B) lacks of V + X tokens: it may know of the added ones or not.

    side   "lora_a" or "lora_b"    vocab_size   V    size   V + X

    ValueError, naming the module, where the vocabulary is another one.
    """
    if size == vocab_size:
        return weights
    added = len(weights.beside.get(EMBEDDINGS, ()))
    known = sorted({vocab_size, vocab_size + added})
    found = weights.lora_a.shape[1] if side == "lora_a" else weights.lora_b.shape[0]
    if found not in known:
        raise ValueError(
            f"{weights.module_name} has lora_A {tuple(weights.lora_a.shape)} and lora_B "
            f"{tuple(weights.lora_b.shape)}, but the vocabulary has {' or '.join(map(str, known))} tokens"
        )
    padded = copy(weights)
    if side == "lora_a":
        padded.lora_a = F.pad(weights.lora_a, (0, size - found))  # (r, V + X)
    else:
        padded.lora_b = F.pad(weights.lora_b, (0, 0, 0, size - found))  # (V + X, r)
    return padded


class Vocabulary(WrappedOption):
    """The wrapped ends of a model, where adapters may add tokens: it gives the layers the new embeddings.

    ends         INPUT or OUTPUT -> module name -> wrapped layer
    is_tied      whether the model reads and writes tokens with the same embeddings
    extra        the most tokens that an adapter may add
    """

    def __init__(self, model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig) -> None:
        kinds = getattr(model, "embedding_modules", {})
        self.ends: dict[str, dict[str, BaseLayerWithLoRA]] = {INPUT: {}, OUTPUT: {}}
        for name, layer in wrapped.modules.items():
            if (kind := kinds.get(name.rpartition(".")[2])) in self.ends:
                self.ends[kind][name] = layer
        self.is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        self.extra = lora_config.lora_extra_vocab_size

    def judge(self, lora: LoRAModel, found: Found) -> None:
        """Add an adapter's new embeddings to what it has for the modules that they are of.

        A module that the adapter leaves alone otherwise gets A and B of rank 0. A tied model uses the input
        embeddings for the output, too, where there are no others. ValueError when the adapter adds more tokens than
        there is room for, and where embeddings do not fit the model.
        """
        if "new_embeddings" not in lora.beside:
            return
        added = lora.beside["added_tokens"]
        if added > self.extra:
            raise NeedsOption(
                f"the adapter adds {added} tokens, but lora_extra_vocab_size is {self.extra}; "
                f"pass --lora-extra-vocab-size {added}",
                lora_extra_vocab_size=added,
            )
        new = lora.beside["new_embeddings"]
        if self.is_tied:
            new = {OUTPUT: new[INPUT], **new}
        for kind, embeddings in new.items():
            if not self.ends[kind]:
                raise ValueError(
                    f"the adapter adds {len(embeddings)} tokens, but the engine's target_modules leave out the module "
                    f"of their {kind}; add it, or leave target_modules away"
                )
            for name, layer in self.ends[kind].items():
                found[name] = {name: _with_embeddings(name, layer, found.get(name, {}), embeddings, kind)}

    def accepted(self, lora: LoRAModel) -> None:
        lora.beside.pop("new_embeddings", None)


def _with_embeddings(
    name: str, layer: BaseLayerWithLoRA, found: dict[str, LoRALayerWeights], embeddings: Tensor, kind: str
) -> LoRALayerWeights:
    """What an adapter has for an end of the model, with the embeddings beside it."""
    if embeddings.shape[1] != (width := layer.slots.beside[EMBEDDINGS][0].shape[2]):
        raise ValueError(
            f"{kind} of the added tokens have shape {tuple(embeddings.shape)}, but the model's hidden size is {width}"
        )
    if found:
        (weights,) = found.values()
    else:
        inputs, outputs = layer.part_shape(0)
        lora_a, lora_b = embeddings.new_empty(0, inputs), embeddings.new_empty(outputs, 0)
        weights = LoRALayerWeights(name, 0, 0, lora_a, lora_b, scaling=1)
    weights = copy(weights)
    weights.beside = {**weights.beside, EMBEDDINGS: embeddings}
    if IS_ADDED in layer.slots.beside:
        weights.beside[IS_ADDED] = embeddings.new_ones(len(embeddings), 1)
    return weights


class AddedTokens(AdapterOption):
    """Adapters that add tokens to the vocabulary, with embeddings of their own."""

    files = FILES

    def read_file(
        self,
        path: str,
        tensors: dict[str, Tensor],
        lora: LoRAModel,
        device: torch.device | str,
        dtype: torch.dtype | None,
    ) -> None:
        check_new_embeddings(path, tensors)
        put_beside(lora, tensors, device, dtype)
        lora.beside["tokenizer_file"] = TokenizerFile.find(Path(path).parent)

    def wrap_model(self, model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig) -> Vocabulary:
        return Vocabulary(model, wrapped, lora_config)
