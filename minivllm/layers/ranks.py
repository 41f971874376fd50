"""Who shares the layers of a model: here one rank, which has all of them. Beside vllm/distributed/parallel_state.py
(v0.22.1), which asks everywhere whether the size of the group is 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Share:
    """Which part of low-rank matrices A (r, K) and B (N, r), added beside a layer's weight, is this rank's. Here: all.

    A layer may fuse several linears; then there are a pair of A and B, K_i and N_i for each of its slices.
    """

    def sizes(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """K_i and N_i of each slice of the layer -> those of this rank."""
        return list(sizes)

    def of_a(self, i: int, lora_a: torch.Tensor) -> torch.Tensor:
        """This rank's part of slice i's A: (..., r, K_i)"""
        return lora_a

    def of_b(self, i: int, lora_b: torch.Tensor) -> torch.Tensor:
        """This rank's part of slice i's B: (..., N_i, r)"""
        return lora_b

    def of(self, parts: list[Any]) -> list[Any]:
        """The pairs of all slices, cut to this rank's part; None, a slice without a pair, stays None.

        Of experts there are n entries each, one expert after the other. The pairs that came in stay as they are.
        """
        return parts


EVERYTHING = Share()


class Ranks:
    """The ranks that share every layer of a model, as seen by one of them; this one is alone and has everything.

    A layer is given it when it is made. It asks which part of its weights is here, and has the results of all ranks put
    together. A subclass for several ranks overrides every method. vLLM asks globals
    (`get_tensor_model_parallel_rank`, `tensor_model_parallel_all_reduce`).

    rank   which of them this is, from 0 on    size   how many there are
    """

    rank = 0
    size = 1

    # ---- which part is here ---------------------------------------------------------------------------------

    def part_of(self, n: int, what: str) -> slice:
        """Which of n things are here; ValueError, naming what they are, unless all ranks can have as many."""
        return slice(0, n)

    def kv_heads(self, heads: int) -> slice:
        """Which key-value heads are here."""
        return slice(0, heads)

    def of_first(self, x: torch.Tensor) -> torch.Tensor:
        """A term that rank 0 alone adds to a sum over all ranks; zeros on others."""
        return x

    def adapter_share(self, layer: nn.Module, slices: int = 1) -> Share:
        """What goes with this rank's part of a layer, of low-rank matrices on so many slices of it.

        layer   a linear, experts, the embedding, or the `LogitsProcessor` for the head
        """
        return EVERYTHING

    # ---- a vocabulary ---------------------------------------------------------------------------------------

    def tokens(self, vocabulary: int) -> int:
        """How many rows each rank has in a table with a row for each token of a vocabulary."""
        return vocabulary

    def own_part(self, vocabulary: int) -> slice:
        """Which tokens this rank's rows stand for."""
        return slice(0, vocabulary)

    def own_tokens(self, by_token: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a table with a row for each token.   (V, ...) -> (tokens(V), ...)"""
        return by_token

    def look_up(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The rows of a table that all ranks share.   ids: (T,) int64   table: (tokens(V), H) -> (T, H)"""
        return F.embedding(ids, table)

    def look_up_own(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """This rank's term of `look_up`, which is their sum."""
        return F.embedding(ids, table)

    def look_up_own_in(
        self, ids: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        """As `look_up_own`, each row in the table of its slot, which also has rows for X added tokens.

        ids, slots: (T,) int64    tables: (S, tokens(V) + X, R) -> (T, R)
        """
        return tables[slots, ids]

    def gather_tokens(self, logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Logits of all tokens, from those of each rank's; added tokens' come last.

        (P, tokens(V) + X) -> (P, V + X)
        """
        return logits

    # ---- what all have together -----------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have. The caller's tensor may change; read only what is returned."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """What all ranks have, side by side along the last dimension.   (..., n) -> (..., size * n)"""
        return x

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks have."""
        return number


ONE_RANK = Ranks()
