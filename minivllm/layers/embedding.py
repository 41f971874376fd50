"""Embeddings and logits.

Stands for vllm/model_executor/layers/vocab_parallel_embedding.py and logits_processor.py (v0.22.1).
"""

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.linear import LinearBase


class VocabParallelEmbedding(nn.Module):
    """A row of weight (V, H) per token (vLLM: VocabParallelEmbedding).

    org_num_embeddings: how many rows are the base model's own tokens, where V has room for more; None = all
    """

    tp_size = 1
    tp_rank = 0

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        org_num_embeddings: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.num_embeddings = num_embeddings
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.embedding_dim = embedding_dim
        weight = torch.empty(num_embeddings, embedding_dim, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (T,) int64 -> (T, H)"""
        return F.embedding(input_ids, self.weight)


class ParallelLMHead(LinearBase):
    """The linear from hidden states to logits, weight (V, H) (vLLM: ParallelLMHead); V as for the embedding."""

    is_head = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        org_num_embeddings: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(embedding_dim, num_embeddings, bias, params_dtype, device, prefix)
        self.num_embeddings = num_embeddings
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.embedding_dim = embedding_dim

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Share the input embedding's table."""
        self.weight = embedding.weight


class LogitsProcessor(nn.Module):
    """Hidden states to logits, a module of its own so that LoRA can wrap it (vLLM: LogitsProcessor)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: (P, H) -> (P, V)"""
        return self._get_logits(hidden_states, lm_head, embedding_bias)

    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: (P, H)   embedding_bias: (V,) or None -> (P, V)"""
        logits, _ = lm_head(hidden_states)  # (P, V)
        return logits if embedding_bias is None else logits + embedding_bias
