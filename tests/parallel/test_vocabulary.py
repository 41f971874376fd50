"""Shares of a vocabulary, and the layers' parts of an adapter, by vLLM's names for what they must be."""

import random

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.parallel.tensor_parallel import TensorParallel
from minivllm.parallel.vocabulary import (
    VocabParallelEmbeddingShardIndices,
    get_masked_input_and_mask,
    num_embeddings_padded,
    sharded_to_full_mapping,
)
from minivllm.vllm.utils import from_layer


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_vocab_parallel_embedding_indices(size, seed):
    rng = random.Random(seed)
    vocabulary, added = rng.randint(4000, 64000), rng.randint(0, 1024)
    org = vocabulary - added

    layers = [
        VocabParallelEmbedding(vocabulary, 1, org_num_embeddings=org, tp=TensorParallel(rank, size))
        for rank in range(size)
    ]

    shards = [VocabParallelEmbeddingShardIndices.of(layer) for layer in layers]
    tokens, end_of_org, end_of_added = [], 0, org
    for shard in shards:
        assert (shard.org_vocab_start_index, shard.added_vocab_start_index) == (end_of_org, end_of_added)
        end_of_org, end_of_added = shard.org_vocab_end_index, shard.added_vocab_end_index
        tokens += range(shard.org_vocab_start_index, end_of_org)
        tokens += [-1] * (shard.num_org_elements_padded - shard.num_org_elements)
        tokens += range(shard.added_vocab_start_index, end_of_added)
        tokens += [-1] * (shard.num_added_elements_padded - shard.num_added_elements)
    assert (end_of_org, end_of_added) == (org, vocabulary)
    assert sum(shard.num_elements_padded for shard in shards) == num_embeddings_padded(layers[0])
    mapping = sharded_to_full_mapping(layers[0])
    assert (mapping is None) == (size == 1)
    in_order = tokens if mapping is None else [tokens[place] for place in mapping]
    assert in_order[:vocabulary] == list(range(vocabulary))
    assert set(in_order[vocabulary:]) <= {-1}


@pytest.mark.parametrize(
    ("org", "padding", "added", "rows"),
    [
        ((0, 8), 0, (8, 12), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ((0, 8), 2, (8, 12), [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13]),
        ((0, 4), 0, (8, 10), [0, 1, 2, 3, None, None, None, None, 4, 5, None, None]),
        ((4, 8), 2, (10, 12), [None, None, None, None, 0, 1, 2, 3, None, None, 6, 7]),
        ((6, 8), 0, (0, 0), [None, None, None, None, None, None, 0, 1, None, None, None, None]),
    ],
)
def test_get_masked_input_and_mask(org, padding, added, rows):
    masked, is_others = get_masked_input_and_mask(torch.arange(12), *org, padding, *added)

    assert masked.tolist() == [row or 0 for row in rows]
    assert is_others.tolist() == [row is None for row in rows]


def wrapped(make, rank, fully):
    layer = make(TensorParallel(rank, 2))
    parts = {QKVParallelLinear: ["q", "k", "v"], MergedColumnParallelLinear: ["gate", "up"]}
    config = LoRAConfig(8, 3, fully_sharded_loras=fully, lora_dtype=torch.float64)
    return from_layer(layer, 3, config, parts.get(type(layer), []))


def random_pair(width, height, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, width, generator=generator), torch.randn(height, 8, generator=generator)


@pytest.mark.parametrize("fully", [False, True], ids=["cut", "fully sharded"])
@pytest.mark.parametrize("rank", [0, 1])
class TestSlices:
    def test_of_a_column_parallel_layer_are_rows_of_b_and_ranks_of_a(self, rank, fully):
        layer = wrapped(lambda tp: ColumnParallelLinear(10, 12, tp=tp), rank, fully)
        a, b = random_pair(10, 12, 0)

        assert torch.equal(layer.slice_lora_a(a), a.chunk(2)[rank] if fully else a)
        assert torch.equal(layer.slice_lora_b(b), b.chunk(2)[rank])
        assert layer.lora_a_stacked[0].shape == (3, 1, 4 if fully else 8, 10)
        assert layer.lora_b_stacked[0].shape == (3, 1, 6, 8)
        assert (layer.tp_rank, layer.tp_size) == (rank, 2)

    def test_of_a_row_parallel_layer_are_columns_of_a_and_rows_of_b(self, rank, fully):
        layer = wrapped(lambda tp: RowParallelLinear(10, 12, tp=tp), rank, fully)
        a, b = random_pair(10, 12, 1)

        assert torch.equal(layer.slice_lora_a(a), a.chunk(2, dim=1)[rank])
        assert torch.equal(layer.slice_lora_b(b), b.chunk(2)[rank] if fully else b)
        assert layer.lora_a_stacked[0].shape == (3, 1, 8, 5)
        assert layer.lora_b_stacked[0].shape == (3, 1, 6 if fully else 12, 8)

    def test_of_a_merged_layer_are_those_of_each_part(self, rank, fully):
        layer = wrapped(lambda tp: MergedColumnParallelLinear(10, [12, 6], tp=tp), rank, fully)
        (a, b), (_, other) = random_pair(10, 12, 2), random_pair(10, 6, 3)

        assert layer.output_slices == (6, 3)
        own_b = layer.slice_lora_b([b, other])
        assert torch.equal(own_b[0], b.chunk(2)[rank])
        assert torch.equal(own_b[1], other.chunk(2)[rank])
        own_a = layer.slice_lora_a([a, None])
        assert torch.equal(own_a[0], a.chunk(2)[rank] if fully else a)
        assert own_a[1] is None

    def test_of_q_k_and_v_are_those_of_whole_heads(self, rank, fully):
        layer = wrapped(lambda tp: QKVParallelLinear(10, 3, 4, 1, tp=tp), rank, fully)
        bs = [random_pair(10, height, height)[1] for height in (12, 3, 3)]

        own = layer.slice_lora_b(bs)

        assert layer.output_slices == (6, 3, 3)
        assert torch.equal(own[0], bs[0].chunk(2)[rank])
        assert torch.equal(own[1], bs[1]), "one key-value head is on both"
        assert torch.equal(own[2], bs[2])

    def test_of_a_replicated_layer_are_all(self, rank, fully):
        layer = wrapped(lambda tp: ReplicatedLinear(10, 12, tp=tp), rank, fully)
        a, b = random_pair(10, 12, 4)

        assert layer.slice_lora_a(a) is a
        assert layer.slice_lora_b(b) is b
