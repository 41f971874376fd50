"""Which part of every layer a process has. Stands for vllm/distributed/parallel_state.py (v0.22.1)."""

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.embedding import LogitsProcessor, VocabParallelEmbedding
from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.ranks import Ranks, Share
from minivllm.parallel.adapter_share import share_of_experts, share_of_linear
from minivllm.parallel.token_share import share_of_tokens
from minivllm.parallel.vocabulary import get_masked_input_and_mask


class TensorParallel(Ranks):
    """One of `size` processes that share every layer of a model, on paper: it knows its part, and meets nobody.

    Layers get it when they are made. They ask it what part is theirs, and have it put parts together. vLLM asks globals
    (`get_tensor_model_parallel_rank`, `tensor_model_parallel_all_reduce`).

    rank   which of them, from 0 on    size   how many there are
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    # ---- what is ours ---------------------------------------------------------------------------------------

    def share(self, n: int, what: str) -> int:
        """How many of n things each process has; ValueError, naming what they are, unless all have as many."""
        if n % self.size:
            fits = max(size for size in range(1, self.size + 1) if n % size == 0)
            raise ValueError(
                f"{what} {n} cannot be divided by tensor_parallel_size {self.size}; pass --tensor-parallel-size {fits}"
            )
        return n // self.size

    def part(self, share: int) -> slice:
        """Which of all things this process has, where each has `share` of them."""
        return slice(self.rank * share, (self.rank + 1) * share)

    def part_of(self, n: int, what: str) -> slice:
        """Which of n things this process has; ValueError as of `share`."""
        return self.part(self.share(n, what))

    def kv_heads(self, heads: int) -> slice:
        """Which key-value heads: as many as others have. Where processes are more than heads, some have the same one.

        ValueError where neither divides the other. vLLM: `num_kv_head_replicas`.
        """
        if self.size <= heads or self.size % heads:
            return self.part_of(heads, "num_key_value_heads")
        first = self.rank * heads // self.size
        return slice(first, first + 1)

    def tokens(self, vocabulary: int) -> int:
        """How many rows each process has for the tokens of a vocabulary; past its end rows stand for none."""
        return -(-vocabulary // self.size)

    # region lab 11.3: shards of a vocabulary
    def own_tokens(self, by_token: torch.Tensor) -> torch.Tensor:
        """The process's rows of a table with a row for each token, zeros where they stand for none.

        (V, ...) -> (tokens(V), ...)
        """
        share = self.tokens(len(by_token))
        own = by_token[self.part(share)]
        return torch.cat([own, own.new_zeros(share - len(own), *own.shape[1:])])

    # endregion

    def of_first(self, x: torch.Tensor) -> torch.Tensor:
        """A term that the first process alone adds to a sum; zeros on others."""
        return x if self.rank == 0 else torch.zeros_like(x)

    def adapter_share(self, layer: nn.Module, slices: int = 1) -> Share:
        """What of an adapter goes with this process's part of a layer."""
        if isinstance(layer, FusedMoE):
            return share_of_experts(layer, slices)
        if isinstance(layer, VocabParallelEmbedding):
            return share_of_tokens(self, layer.org_vocab_size, of_embedding=True)
        if isinstance(layer, LogitsProcessor):
            return share_of_tokens(self, layer.vocab_size, of_embedding=False)
        return share_of_linear(layer, slices)

    def own_part(self, vocabulary: int) -> slice:
        """Which tokens this process has; the last processes may have fewer than others."""
        part = self.part(self.tokens(vocabulary))
        return slice(min(part.start, vocabulary), min(part.stop, vocabulary))

    # ---- what all have --------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all processes have. The caller's tensor may change; read only what is returned."""
        raise NotImplementedError

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """What all processes have, side by side along the last dimension.   (..., n) -> (..., size * n)"""
        raise NotImplementedError

    def least(self, number: int) -> int:
        """The least of the numbers that the processes have."""
        raise NotImplementedError

    def look_up(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The rows of a table that processes share out.   ids: (T,) int64   table: (rows of each, H) -> (T, H)"""
        return self.all_reduce(self.look_up_own(ids, table))

    # region lab 11.3: shards of a vocabulary
    def look_up_own(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """This process's term of `look_up`: zeros for the rows of others."""
        own = self.part(len(table))
        rows, is_others = get_masked_input_and_mask(ids, own.start, own.stop, 0, 0, 0)
        return F.embedding(rows, table).masked_fill(is_others[:, None], 0)

    def look_up_own_in(
        self, ids: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        """As `look_up_own`, each row in the table of its slot. Added tokens are the first process's.

        ids, slots: (T,) int64    tables: (S, tokens(V) + X, R) -> (T, R)
        """
        own = self.own_part(vocabulary)
        end = vocabulary + tables.shape[1] - self.tokens(vocabulary)
        # The first process's own tokens fill its share: no padding is before the added ones.
        added = (vocabulary, end) if self.rank == 0 else (0, 0)
        rows, is_others = get_masked_input_and_mask(ids, own.start, own.stop, 0, *added)
        return tables[slots, rows].masked_fill(is_others[:, None], 0)

    def gather_tokens(self, logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Logits of all tokens, of each process's. Columns past the process's own tokens are the same on all: added
        tokens.   (P, tokens(V) + X) -> (P, V + X)
        """
        own, added = logits.tensor_split([self.tokens(vocabulary)], dim=1)
        gathered = self.all_gather(own)[:, :vocabulary]
        return torch.cat([gathered, added], dim=1) if added.numel() else gathered

    # endregion
