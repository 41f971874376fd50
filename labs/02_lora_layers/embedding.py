"""Adapters on the input embedding. Stands for vllm/lora/layers/vocal_parallel_embedding.py (v0.22.1)."""

from labs.kit.overlay import Todo
import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots
from minivllm.options.legacy.vocabulary import EMBEDDINGS, pad_to_slots
from minivllm.options.option_layer import OptionLayer


class VocabParallelEmbeddingWithLoRA(OptionLayer):
    """A base embedding with room for S adapters, and for the tokens that they add. vLLM: the same name.

    PEFT stores an embedding's A as (r, V). A token needs one column of it, so here A lies the other way round, a row
    a token, and is looked up like the base embedding itself.

    lora_a_stacked      (S, V + X, R); of processes that share the layer each has `tokens(V)` rows, and X
    lora_b_stacked      (S, 1, H, R)
    embeddings_tensors  (S, X, H) embeddings of the tokens that each adapter adds, X being `lora_extra_vocab_size`;
                        their ids begin at V. None where X is 0
    """

    def __init__(self, base_layer: VocabParallelEmbedding) -> None:
        self.vocab_size = base_layer.org_vocab_size
        super().__init__(base_layer, [(self.vocab_size, base_layer.embedding_dim)])
        self.tp = base_layer.tp
        self.share = self.tp.adapter_share(base_layer)
        self.embeddings_tensors: torch.Tensor | None = None

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty."""
        weight, rank = self.base_layer.weight, lora_config.max_lora_rank
        extra, width = lora_config.lora_extra_vocab_size, self.base_layer.embedding_dim
        where = {"dtype": lora_config.slot_dtype(weight.dtype), "device": weight.device}
        by_token = torch.zeros(max_loras, self.tp.tokens(self.vocab_size) + extra, rank, **where)
        b = torch.zeros(max_loras, 1, width, rank, **where)
        self.slots = Slots([by_token.transpose(1, 2)[:, None]], [b])  # (S, 1, R, V + X), (S, 1, H, R)
        self.max_rank, self.slice_sizes = rank, [(self.vocab_size + extra, width)]
        if extra:
            self.embeddings_tensors = torch.zeros(max_loras, extra, width, **where)
            self.slots.beside[EMBEDDINGS] = (self.embeddings_tensors,)

    @property
    def lora_a_stacked(self) -> torch.Tensor:
        return self.slots.a[0][:, 0].transpose(1, 2)

    @property
    def lora_b_stacked(self) -> torch.Tensor:
        return self.slots.b[0]

    def part_shape(self, part: int) -> tuple[int, int]:
        return self.vocab_size, self.base_layer.embedding_dim

    def by_slice(self, found: dict[str, LoRALayerWeights]) -> list[LoRALayerWeights | None]:
        """A as wide as the slots' vocabulary."""
        (weights,) = super().by_slice(found)
        return [pad_to_slots(weights, "lora_a", self.vocab_size, self.slice_sizes[0][0])]

    # region lab 2.8: an embedding with adapters
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each token's embedding, with its row's own adapter.   x: (T,) int64 -> (T, H)

        A batch without adapters (`no_lora`) is the base layer's alone. Else the backend says which slot each row has:
        `token_slots(T)`, (T,) int64, -1 = base. Adapters add to what the base layer gives, or
        where they may bring tokens (`embeddings_tensors` is not None) to what `_base_output` gives. They add
        B · (A of the token), where one of this step has weights here (`reaches(slots)`): the token's row is looked up
        in `lora_a_stacked`, and `expand(y, rows of A, slots, token_rows(T))` multiplies, and leaves base rows alone.
        Processes share tokens out: each has its term (`tp.look_up_own`, `look_up_own_in`), `tp.all_reduce` sums them.
        """
        raise Todo("lab 2.8: an embedding with adapters")

    def _base_output(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The base embedding of each token, or the adapter's for one that it adds.   x, slots: (T,) -> (T, H)

        Ids from `vocab_size` on are added tokens, in the order of `embeddings_tensors`. The base layer has no row for
        them, nor has the buffer one for the others. Added tokens are the first process's (`tp.of_first`).
        """
        raise Todo("lab 2.8: an embedding with adapters")

    # endregion

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        return type(layer) is VocabParallelEmbedding

    @classmethod
    def parts_in(cls, model: nn.Module, name: str, layer: nn.Module) -> list[str] | None:
        """Embeddings are adapted where the model's `embedding_modules` lists them."""
        is_listed = name.rpartition(".")[2] in getattr(model, "embedding_modules", {})
        return [] if is_listed and isinstance(layer, VocabParallelEmbedding) else None
