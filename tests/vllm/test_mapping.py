"""vLLM's mapping of a batch and what its `convert_mapping` makes of it, over our `slots_of`."""

import pytest
import torch

from minivllm.vllm.layers import LoRAMapping, LoRAMappingType
from minivllm.vllm.punica_selector import convert_mapping


def converted(index_mapping, prompt_mapping, table, extra_vocab_size=0):
    mapping = LoRAMapping(index_mapping, prompt_mapping)
    return convert_mapping(mapping, table, len(table) + 1, 100, extra_vocab_size, "cpu")


def test_tokens_and_sampled_rows_are_mapped_each_by_its_own():
    """Three requests of 3, 1 and 2 tokens, the last of which is not done with its prompt."""
    tokens, sampler, _, _, lengths = converted((8, 8, 8, 0, 5, 5), (8, 0), [5, None, 8])

    assert tokens.tolist() == [2, 2, 2, -1, 0, 0]
    assert sampler.tolist() == [2, -1]
    assert tokens.dtype == sampler.dtype == torch.int64
    assert lengths == [6, 2, 2, 6]


def test_padded_sampler_indices_count_base_rows_as_one_slot_more():
    """As vLLM has it: row + rows * slot, where the base is slot max_loras - 1 of a max_loras that counts it."""
    _, _, padded, _, _ = converted((8, 0, 5), (8, 0, 5), [5, None, 8])

    assert padded.tolist() == [0 + 3 * 2, 1 + 3 * 3, 2 + 3 * 0]


def test_embedding_indices_are_where_each_tokens_rows_start():
    """As vLLM has it: base tokens read where slot 0 does; nobody uses what they read."""
    _, _, _, embeddings, _ = converted((8, 0, 5), (8, 0, 5), [5, None, 8], extra_vocab_size=10)

    assert embeddings.tolist() == [[20, 0, 0], [220, 0, 0]]


@pytest.mark.parametrize(("index", "prompt"), [((1, 4), (1,)), ((1, 1), (4,))])
def test_an_unknown_adapter_is_refused_among_tokens_and_among_sampled_rows(index, prompt):
    with pytest.raises(ValueError, match="4"):
        converted(index, prompt, [1, 2])


def test_a_batch_of_no_rows_has_empty_indices():
    tokens, sampler, padded, embeddings, lengths = converted((), (), [1])

    assert [len(t) for t in (tokens, sampler, padded)] == [0, 0, 0]
    assert embeddings.shape == (2, 0)
    assert lengths == [0, 0, 0, 0]


def test_a_mapping_is_compared_by_its_rows():
    mapping = LoRAMapping([1, 0], [1, 0])

    assert mapping == LoRAMapping((1, 0), (1, 0))
    assert mapping != LoRAMapping((0, 1), (1, 0))
    assert mapping != LoRAMapping((1, 0), (0, 1))
    assert (mapping.index_mapping, mapping.type) == ((1, 0), LoRAMappingType.LANGUAGE)
