"""Adapters on the output embedding. Stands for vllm/lora/layers/logits_processor.py (v0.22.1)."""

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import LogitsProcessor, ParallelLMHead
from minivllm.lora.layers.base import BaseLayerWithLoRA, Weights, as_list


class LogitsProcessorWithLoRA(BaseLayerWithLoRA):
    """The way from hidden states to logits, with room for S adapters on `lm_head`. vLLM: the same name.

    It stands in the place of the logits processor, not of `lm_head`: tied to the input embedding, that one has no
    weight of its own. It sees sampled rows only, so it asks the backend for the adapters of those.

    hidden_size         H
    lora_a_stacked      (S, 1, R, H)
    lora_b_stacked      (S, 1, V + X, R)
    embeddings_tensors  (S, X, H) output embeddings of the tokens that each adapter adds, X being
                        `lora_extra_vocab_size`. None where X is 0
    added_tokens        (S,) int64: how many each adapter adds

    dtype and device are those of the head. sharded_to_full_mapping is for more ranks than one: None.
    """

    def __init__(
        self,
        base_layer: LogitsProcessor,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        sharded_to_full_mapping: list[int] | None,
    ) -> None:
        super().__init__(base_layer)
        if sharded_to_full_mapping is not None:
            raise ValueError("sharded_to_full_mapping must be None: there is one tensor-parallel rank")
        self.hidden_size = hidden_size
        self.dtype, self.device = dtype, device
        self.tp_size, self.tp_rank = 1, 0
        self.embeddings_tensors: torch.Tensor | None = None

    @property
    def vocab_size(self) -> int:
        return self.base_layer.vocab_size

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty."""
        rank, extra = lora_config.max_lora_rank, lora_config.lora_extra_vocab_size
        where = {"dtype": lora_config.slot_dtype(self.dtype), "device": self.device}
        self.lora_a_stacked = torch.zeros(max_loras, 1, rank, self.hidden_size, **where)
        self.lora_b_stacked = torch.zeros(max_loras, 1, self.vocab_size + extra, rank, **where)
        if extra:
            self.embeddings_tensors = torch.zeros(max_loras, extra, self.hidden_size, **where)
            self.added_tokens = torch.zeros(max_loras, dtype=torch.long, device=self.device)
        self.live_ranks = [[0] * max_loras]

    @property
    def a_slots(self) -> tuple[torch.Tensor, ...]:
        return (self.lora_a_stacked,)

    @property
    def b_slots(self) -> tuple[torch.Tensor, ...]:
        return (self.lora_b_stacked,)

    @property
    def extra_slots(self) -> tuple[torch.Tensor, ...]:
        return () if self.embeddings_tensors is None else (self.embeddings_tensors,)

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return () if self.embeddings_tensors is None else (self.added_tokens,)

    def _bind_slots(self, a_slots: tuple[torch.Tensor, ...], b_slots: tuple[torch.Tensor, ...]) -> None:
        (self.lora_a_stacked,), (self.lora_b_stacked,) = a_slots, b_slots

    def part_shape(self, part: int) -> tuple[int, int]:
        return self.hidden_size, self.lora_b_stacked.shape[2]

    def slot_written(self, index: int, ranks: list[int], extra_rows: list[int]) -> None:
        if extra_rows:
            self.added_tokens[index] = extra_rows[0]
        super().slot_written(index, ranks, extra_rows)

    def _set_extras(self, index: int, extras: Weights) -> None:
        super()._set_extras(index, extras)
        if self.extra_slots:
            (own,) = as_list(extras)
            self.added_tokens[index] = 0 if own is None else len(own)

    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: (P, H) -> (P, V), or (P, V + X) where a row's adapter may add tokens"""
        return self._get_logits(hidden_states, lm_head, embedding_bias)

    # region lab 2.9: logits with adapters
    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The base layer's logits, with each sampled row's own adapter added.   hidden_states: (P, H) -> (P, V)

        A batch without adapters (`no_lora`) is the base layer's alone (its `_get_logits`). Where adapters may add
        tokens there are logits for these too: `_with_added_tokens`, (P, V + X), as wide as B is tall. Where an adapter
        of this step has weights here (`reaches(self)`), the backend adds in place what A and B give:
        `apply_logits(self, logits, hidden_states)`. It knows the rows that are sampled.
        """
        logits = self.base_layer._get_logits(hidden_states, lm_head, embedding_bias)  # (P, V)
        if self.punica_wrapper.no_lora:
            return logits
        if self.embeddings_tensors is not None:
            logits = self._with_added_tokens(logits, hidden_states)  # (P, V + X)
        if self.punica_wrapper.reaches(self):
            self.punica_wrapper.apply_logits(self, logits, hidden_states)
        return logits

    def _with_added_tokens(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens that each row's adapter adds, in X columns more.   (P, V), (P, H) -> (P, V + X)

        Each is hidden state times embedding (`embeddings_tensors`). Of a token that the row's adapter does not add
        (`added_tokens`; base rows add none) the logit is -inf. Which slot each row has the backend says:
        `slots_of_samples(P)`, (P,) int64, -1 = base.

        One product with the tokens of all slots, of which each row takes its own slot's: to gather the embeddings of
        every row would move far more.
        """
        slots = self.punica_wrapper.slots_of_samples(len(logits))  # (P,)
        is_base, own = slots < 0, slots.clamp(min=0)
        stacked = self.embeddings_tensors  # (S, X, H)
        of_all = F.linear(hidden_states.to(stacked.dtype), stacked.flatten(0, 1))  # (P, S * X)
        rows = torch.arange(len(slots), device=slots.device)
        added = of_all.unflatten(1, stacked.shape[:2])[rows, own].to(logits.dtype)  # (P, X)
        counts = self.added_tokens[own].masked_fill(is_base, 0)  # (P,)
        is_missing = torch.arange(stacked.shape[1], device=slots.device) >= counts[:, None]  # (P, X)
        return torch.cat([logits, added.masked_fill(is_missing, float("-inf"))], dim=1)  # (P, V + X)

    # endregion

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """Never alone: it takes an `lm_head` beside it, see `from_layer_logits_processor`."""
        return False
