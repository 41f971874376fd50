"""Tokens that an adapter adds, given to the layers they are of. Stands for a part of vllm/lora/models.py up to 0.10."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from minivllm.lora.lora_weights import LoRALayerWeights

if TYPE_CHECKING:
    from minivllm.lora.layers import BaseLayerWithLoRA
    from minivllm.lora.lora_model import LoRAModel

INPUT, OUTPUT = "input_embeddings", "output_embeddings"


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
        added = lora.beside.get("added_tokens", 0)
        if added > self.extra:
            raise ValueError(
                f"the adapter adds {added} tokens, but lora_extra_vocab_size is {self.extra}; "
                f"pass --lora-extra-vocab-size {added}"
            )
        if not self.extra or "has_slots_vocabulary" in lora.beside:
            return
        new = lora.beside.pop("new_embeddings", {})
        if self.is_tied and new:
            new = {OUTPUT: new[INPUT], **new}
        for kind, layers in self.ends.items():
            for name, layer in layers.items():
                if name in lora.loras:
                    self._fill_up(kind, layer, lora.loras[name], added)
        for kind, embeddings in new.items():
            self._attach(lora, kind, embeddings)
        lora.beside["has_slots_vocabulary"] = True

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
