"""Embeddings and logits.

Stands for vllm/model_executor/layers/vocab_parallel_embedding.py and logits_processor.py (v0.22.1).
"""

from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.linear import LinearBase, Product
from minivllm.layers.ranks import ONE_RANK, Ranks


class VocabParallelEmbedding(nn.Module):
    """A row of weight (V, H) per token; processes share the tokens out (vLLM: VocabParallelEmbedding).

    org_num_embeddings: how many rows are the base model's own tokens, where V has room for more; None = all
    rows: tokens of this process; its weight has zeros past them, where others have more
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        org_num_embeddings: int | None = None,
        prefix: str = "",
        tp: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.prefix, self.tp = prefix, tp
        self.num_embeddings = num_embeddings
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.embedding_dim = embedding_dim
        self.rows = tp.own_part(num_embeddings)
        weight = torch.empty(tp.tokens(num_embeddings), embedding_dim, dtype=params_dtype, device=device)
        weight[self.rows.stop - self.rows.start :] = 0
        self.weight = nn.Parameter(weight, requires_grad=False)

    tp_rank, tp_size = property(attrgetter("tp.rank")), property(attrgetter("tp.size"))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (T,) int64 -> (T, H)"""
        return self.tp.look_up(input_ids, self.weight)


class ParallelLMHead(LinearBase):
    """The linear from hidden states to logits, weight (V, H) (vLLM: ParallelLMHead); V as for the embedding.

    `forward` gives the logits of the process's own tokens.
    """

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
        tp: Ranks = ONE_RANK,
        product: Product = F.linear,
    ) -> None:
        super().__init__(embedding_dim, num_embeddings, bias, params_dtype, device, prefix, tp, product)
        self.num_embeddings = num_embeddings
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.embedding_dim = embedding_dim
        for parameter in self.parameters():
            parameter[self.rows[0].stop - self.rows[0].start :] = 0

    def _take_part(self) -> None:
        self.heights, self.rows = [self.output_size], [self.tp.own_part(self.output_size)]
        self.columns = slice(0, self.input_size)

    @property
    def output_size_per_partition(self) -> int:
        """As many as others have."""
        return self.tp.tokens(self.output_size)

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Share the input embedding's table."""
        self.weight = embedding.weight


class LogitsProcessor(nn.Module):
    """Hidden states to logits of all tokens, a module of its own so that LoRA can wrap it (vLLM: LogitsProcessor)."""

    def __init__(self, vocab_size: int, tp: Ranks = ONE_RANK) -> None:
        super().__init__()
        self.vocab_size, self.tp = vocab_size, tp

    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: (P, H) -> (P, V)"""
        return self._get_logits(hidden_states, lm_head, embedding_bias)

    def own_logits(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of this process's tokens.   hidden_states: (P, H)   embedding_bias: (V,) or None -> (P, tokens(V))"""
        logits, _ = lm_head(hidden_states)
        return logits if embedding_bias is None else logits + self.tp.own_tokens(embedding_bias)

    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: (P, H)   embedding_bias: (V,) or None -> (P, V)"""
        own = self.own_logits(lm_head, hidden_states, embedding_bias)
        return self.tp.gather_tokens(own, self.vocab_size)  # (P, V)
