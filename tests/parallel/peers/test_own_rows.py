"""A process's own rows in one kernel, beside those of whole tables."""

import pytest
import torch

from minivllm.parallel.peers.group import PeerGroup
from minivllm.parallel.peers.own_rows_op import own_rows
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.tools.device import DEVICE


def table_of(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def share(table, rank, size):
    """A process's rows of (..., V, H), NaN past the last."""
    rows = -(-table.shape[-2] // size)
    padded = torch.cat(
        [table, table.new_full((*table.shape[:-2], rows * size, table.shape[-1]), torch.nan)], -2
    )
    return padded[..., rank * rows : (rank + 1) * rows, :].contiguous()


@pytest.mark.parametrize(
    ("vocabulary", "size", "width"), [(6, 2, 4), (7, 2, 1024), (7, 3, 1500), (4, 3, 1), (5, 8, 33)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_terms_of_all_processes_are_the_rows_of_the_table(vocabulary, size, width, dtype):
    table = table_of(vocabulary, width, dtype=dtype)
    ids = torch.tensor([0, vocabulary - 1, 2, 2, vocabulary // 2])

    terms = [
        PeerGroup.look_up_own(
            TensorParallel(rank, size), ids.to(DEVICE), share(table, rank, size).to(DEVICE)
        ).cpu()
        for rank in range(size)
    ]

    assert torch.equal(sum(terms), table[ids])


@pytest.mark.parametrize("added", [0, 3])
@pytest.mark.parametrize(("vocabulary", "size"), [(6, 2), (7, 2), (7, 3), (4, 3)])
def test_in_slots_added_tokens_are_the_first_processs(vocabulary, size, added):
    whole = table_of(3, vocabulary + added, 5)
    own, behind = whole.split([vocabulary, added], dim=1)
    last = vocabulary + added - 1
    ids, slots = torch.tensor([0, last, vocabulary - 1, 1, 1, last, 2]), torch.tensor([2, 1, 0, 0, 2, 2, 1])

    def term(rank):
        tables = torch.cat([share(own, rank, size), behind], dim=1).to(DEVICE)
        process = TensorParallel(rank, size)
        return PeerGroup.look_up_own_in(process, ids.to(DEVICE), tables, slots.to(DEVICE), vocabulary).cpu()

    terms = [term(rank) for rank in range(size)]

    assert torch.equal(sum(terms), whole[slots, ids])
    assert not any(term[ids >= vocabulary].any() for term in terms[1:])


def test_rows_may_lie_apart():
    tables = table_of(2, 9, 8)[:, 1:6, :3].to(DEVICE)
    ids, slots = torch.tensor([4, 5, 6, 9], device=DEVICE), torch.tensor([0, 1, 1, 0], device=DEVICE)

    found = own_rows(ids, tables, slice(5, 10), slots=slots)

    expected = torch.stack([0 * tables[0, 0], tables[1, 0], tables[1, 1], tables[0, 4]])
    assert torch.equal(found, expected)


def test_of_no_tokens_there_are_no_rows():
    assert own_rows(
        torch.zeros(0, dtype=torch.long, device=DEVICE), table_of(3, 4).to(DEVICE), slice(0, 3)
    ).shape == (0, 4)
