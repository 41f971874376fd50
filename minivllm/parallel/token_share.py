"""Which part of an adapter on a model's ends a process has. vLLM (v0.22.1) gives every process all of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from minivllm.layers.ranks import EVERYTHING, Ranks, Share


@dataclass
class TokenShare(Share):
    """For adapters on the ends of a model: the rows of B (of an embedding, the columns of A) of the process's tokens.

    vocabulary   V; past it come added tokens, which every process has     of_embedding   whether it is A that is cut
    """

    tp: Ranks
    vocabulary: int
    of_embedding: bool

    def sizes(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        ((width, height),) = sizes
        more = self.tp.tokens(self.vocabulary) - self.vocabulary
        return [(width + more, height)] if self.of_embedding else [(width, height + more)]

    def of_a(self, i: int, lora_a: torch.Tensor) -> torch.Tensor:
        return self._own(lora_a.T).T if self.of_embedding else lora_a

    def of_b(self, i: int, lora_b: torch.Tensor) -> torch.Tensor:
        return lora_b if self.of_embedding else self._own(lora_b)

    def of(self, parts: list[Any]) -> list[Any]:
        return [
            part and replace(part, lora_a=self.of_a(0, part.lora_a), lora_b=self.of_b(0, part.lora_b))
            for part in parts
        ]

    def _own(self, by_token: torch.Tensor) -> torch.Tensor:
        """(V + X, r) -> (tokens(V) + X, r)"""
        own, added = by_token.tensor_split([self.vocabulary])
        return torch.cat([self.tp.own_tokens(own), added])


def share_of_tokens(tp: Ranks, vocabulary: int, of_embedding: bool) -> Share:
    return EVERYTHING if tp.size == 1 else TokenShare(tp, vocabulary, of_embedding)
