"""Which tokens a process has. Stands for parts of vllm/model_executor/layers/vocab_parallel_embedding.py (v0.22.1)."""

from dataclasses import dataclass

import torch

from minivllm.layers.embedding import VocabParallelEmbedding


def get_masked_input_and_mask(
    input_: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row that each token has in a process's table, and which tokens are others'. These get row 0.

    The table has a run of the base model's tokens, then padding, then a run of added tokens.

    input_: (T,) int64 -> (T,) int64, (T,) bool. vLLM: the same name.
    """
    is_org = (input_ >= org_vocab_start_index) & (input_ < org_vocab_end_index)
    is_added = (input_ >= added_vocab_start_index) & (input_ < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = torch.where(is_org, input_ - org_vocab_start_index, input_ - added_vocab_start_index + first_added)
    is_others = ~(is_org | is_added)
    return rows.masked_fill(is_others, 0), is_others


@dataclass(frozen=True)
class VocabParallelEmbeddingShardIndices:
    """A process's rows of a vocabulary: the base model's own tokens, and those added to them. vLLM: the same name.

    Each kind from a start to an end. The padded end is that of its rows: past the end they stand for no token.
    """

    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int
    num_org_vocab_padding: int
    num_added_vocab_padding: int

    @classmethod
    def of(cls, embedding: VocabParallelEmbedding) -> "VocabParallelEmbeddingShardIndices":
        """Which tokens the rows of an embedding's weight stand for. What is padding comes last.

        vLLM: `VocabParallelEmbedding.shard_indices`.
        """
        rows, org_vocab_size = embedding.rows, embedding.org_vocab_size
        start, end = min(rows.start, org_vocab_size), min(rows.stop, org_vocab_size)
        added = max(rows.start, org_vocab_size), max(rows.stop, org_vocab_size)
        padding = len(embedding.weight) - (rows.stop - rows.start)
        of_added = padding if added[1] > added[0] else 0
        return cls(start, end, *added, padding - of_added, of_added)

    @property
    def num_org_elements(self) -> int:
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_added_elements(self) -> int:
        return self.added_vocab_end_index - self.added_vocab_start_index

    @property
    def num_org_elements_padded(self) -> int:
        return self.num_org_elements + self.num_org_vocab_padding

    @property
    def num_added_elements_padded(self) -> int:
        return self.num_added_elements + self.num_added_vocab_padding

    @property
    def num_elements_padded(self) -> int:
        return self.num_org_elements_padded + self.num_added_elements_padded


def num_embeddings_padded(embedding: VocabParallelEmbedding) -> int:
    """Rows of an embedding on all processes. vLLM: `VocabParallelEmbedding.num_embeddings_padded`."""
    return embedding.tp.size * len(embedding.weight)


def sharded_to_full_mapping(embedding: VocabParallelEmbedding) -> list[int] | None:
    """Where each token's row is among the rows of all processes: in order; None where one process has all.

    vLLM: `VocabParallelEmbedding.get_sharded_to_full_mapping`.
    """
    return list(range(num_embeddings_padded(embedding))) if embedding.tp.size > 1 else None
