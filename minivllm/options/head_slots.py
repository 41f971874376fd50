"""Room for adapters on a model's head. Stands for half of vllm/lora/layers/logits_processor.py (v0.22.1)."""

import torch

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import LogitsProcessor
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots
from minivllm.options.legacy.vocabulary import EMBEDDINGS, IS_ADDED, pad_to_slots
from minivllm.options.option_layer import OptionLayer


class HeadSlots(OptionLayer):
    """The slots of a model's head, which the logits processor beside it has.

    hidden_size         H
    lora_a_stacked      (S, 1, R, H)
    lora_b_stacked      (S, 1, V + X, R); of processes that share the head each has `tokens(V)` rows, and X
    embeddings_tensors  (S, X, H) output embeddings of the tokens that each adapter adds, X being
                        `lora_extra_vocab_size`. None where X is 0
    is_added            (S, X, 1): 1 for each token that the adapter in a slot adds, else 0; None likewise

    dtype and device are those of the head. sharded_to_full_mapping: None, since gathered logits are in order.
    """

    def __init__(
        self,
        base_layer: LogitsProcessor,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        sharded_to_full_mapping: list[int] | None,
    ) -> None:
        super().__init__(base_layer, [(hidden_size, base_layer.vocab_size)])
        self.tp = base_layer.tp
        self.share = self.tp.adapter_share(base_layer)
        if sharded_to_full_mapping is not None:
            raise ValueError("sharded_to_full_mapping must be None: gathered logits are in order")
        self.hidden_size = hidden_size
        self.dtype, self.device = dtype, device
        self.tp_size, self.tp_rank = self.tp.size, self.tp.rank
        self.embeddings_tensors: torch.Tensor | None = None
        self.is_added: torch.Tensor | None = None

    @property
    def vocab_size(self) -> int:
        return self.base_layer.vocab_size

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty."""
        extra, dtype = lora_config.lora_extra_vocab_size, lora_config.slot_dtype(self.dtype)
        self.max_rank, self.slice_sizes = (
            lora_config.max_lora_rank,
            [(self.hidden_size, self.vocab_size + extra)],
        )
        sizes = self.share.sizes(self.slice_sizes)
        self.slots = Slots.empty(max_loras, self.max_rank, sizes, dtype, self.device)
        if extra:
            self.embeddings_tensors = torch.zeros(
                max_loras, extra, self.hidden_size, dtype=dtype, device=self.device
            )
            self.slots.beside[EMBEDDINGS] = (self.embeddings_tensors,)
            self.is_added = self.embeddings_tensors.new_zeros(max_loras, extra, 1)
            self.slots.beside[IS_ADDED] = (self.is_added,)

    @property
    def lora_a_stacked(self) -> torch.Tensor:
        return self.slots.a[0]

    @property
    def lora_b_stacked(self) -> torch.Tensor:
        return self.slots.b[0]

    def part_shape(self, part: int) -> tuple[int, int]:
        return self.hidden_size, self.vocab_size

    def by_slice(self, found: dict[str, LoRALayerWeights]) -> list[LoRALayerWeights | None]:
        """B as tall as the slots' vocabulary."""
        (weights,) = super().by_slice(found)
        return [pad_to_slots(weights, "lora_b", self.vocab_size, self.slice_sizes[0][1])]
