"""Adapters on the input embedding. Stands for vllm/lora/layers/vocal_parallel_embedding.py (v0.22.1)."""

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.lora.layers.base import BaseLayerWithLoRA


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    """A base embedding with room for S adapters, and for the tokens that they add. vLLM: the same name.

    PEFT stores an embedding's A as (r, V). A token needs one column of it, so here A lies the other way round, a row
    a token, and is looked up like the base embedding itself.

    lora_a_stacked      (S, V + X, R)
    lora_b_stacked      (S, 1, H, R)
    embeddings_tensors  (S, X, H) embeddings of the tokens that each adapter adds, X being `lora_extra_vocab_size`;
                        their ids begin at V. None where X is 0
    """

    def __init__(self, base_layer: VocabParallelEmbedding) -> None:
        super().__init__(base_layer)
        self.vocab_size = base_layer.org_vocab_size
        self.embeddings_tensors: torch.Tensor | None = None

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty."""
        weight, rank = self.base_layer.weight, lora_config.max_lora_rank
        dtype = lora_config.slot_dtype(weight.dtype)
        extra, width = lora_config.lora_extra_vocab_size, self.base_layer.embedding_dim
        where = {"dtype": dtype, "device": weight.device}
        self.lora_a_stacked = torch.zeros(max_loras, self.vocab_size + extra, rank, **where)
        self.lora_b_stacked = torch.zeros(max_loras, 1, width, rank, **where)
        if extra:
            self.embeddings_tensors = torch.zeros(max_loras, extra, width, **where)
        self.live_ranks = [[0] * max_loras]

    @property
    def a_slots(self) -> tuple[torch.Tensor, ...]:
        return (self.lora_a_stacked.transpose(1, 2)[:, None],)  # (S, 1, R, V + X)

    @property
    def b_slots(self) -> tuple[torch.Tensor, ...]:
        return (self.lora_b_stacked,)

    @property
    def extra_slots(self) -> tuple[torch.Tensor, ...]:
        return () if self.embeddings_tensors is None else (self.embeddings_tensors,)

    def _bind_slots(self, a_slots: tuple[torch.Tensor, ...], b_slots: tuple[torch.Tensor, ...]) -> None:
        self.lora_a_stacked, self.lora_b_stacked = a_slots[0][:, 0].transpose(1, 2), b_slots[0]

    def part_shape(self, part: int) -> tuple[int, int]:
        return self.lora_a_stacked.shape[1], self.base_layer.embedding_dim

    # region lab 2.8: an embedding with adapters
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each token's embedding, with its row's own adapter.   x: (T,) int64 -> (T, H)

        A batch without adapters (`no_lora`) is the base layer's alone. Else the backend says which slot each row has:
        `slots_of_tokens(T)`, (T,) int64, -1 = base. What `_base_output` gives is what adapters add to. They add
        B · (A of the token), where one of this step has weights here (`reaches(self)`): the token's row is looked up in
        `lora_a_stacked`, and `add_lora_embedding(y, rows, B)` multiplies, and leaves base rows as they are.
        """
        if self.punica_wrapper.no_lora:
            return self.base_layer(x)
        slots = self.punica_wrapper.slots_of_tokens(len(x))  # (T,)
        y = self._base_output(x, slots)  # (T, H)
        if self.punica_wrapper.reaches(self):
            columns = self.lora_a_stacked[slots.clamp(min=0), x]  # (T, R)
            self.punica_wrapper.add_lora_embedding(y, columns, self.lora_b_stacked)
        return y

    def _base_output(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The base embedding of each token, or the adapter's for one that it adds.   x, slots: (T,) -> (T, H)

        Ids from `vocab_size` on are added tokens, in the order of `embeddings_tensors`. The base layer has no row for
        them, nor has the buffer one for the others. There is no buffer where adapters may add none.
        """
        if self.embeddings_tensors is None:
            return self.base_layer(x)
        added = x - self.vocab_size  # (T,) which of the added tokens; negative for the model's own
        is_new = added >= 0
        own = self.base_layer(x.masked_fill(is_new, 0))  # (T, H)
        new = self.embeddings_tensors[slots.clamp(min=0), added.clamp(min=0)]  # (T, H)
        return torch.where(is_new[:, None], new.to(own.dtype), own)

    # endregion

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        return type(source_layer) is VocabParallelEmbedding
