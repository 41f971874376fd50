"""What a process has of a layer, and what all have together."""

import pytest
import torch

from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.worlds.ranks import in_lockstep


def test_alone_a_process_has_all_and_hands_tensors_back_as_they_are():
    x = torch.randn(3, 4)

    assert ONE_RANK.part_of(7, "heads") == slice(0, 7)
    assert ONE_RANK.all_reduce(x) is x
    assert ONE_RANK.all_gather(x) is x


def test_every_method_of_a_rank_that_is_alone_is_overridden_for_several():
    """One that is inherited would be silently wrong: each process would take its part for the whole."""
    asked = {name for name, of_one in vars(Ranks).items() if callable(of_one)}

    assert len(asked) > 10
    assert asked - vars(TensorParallel).keys() == set()


def test_the_parts_of_all_processes_are_the_whole_in_order():
    whole = torch.arange(12)

    parts = in_lockstep(3, lambda tp: whole[tp.part_of(12, "rows")])

    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("size", "number", "divides"), [(2, 9, 1), (4, 9, 3), (4, 6, 3)])
def test_what_cannot_be_divided_is_refused_by_name_with_a_size_that_can(size, number, divides):
    expected = f"attention heads {number} cannot be divided by tensor_parallel_size {size}; "

    with pytest.raises(ValueError, match=expected + f"pass --tensor-parallel-size {divides}"):
        in_lockstep(size, lambda tp: tp.share(number, "attention heads"))


def test_all_processes_get_the_sum_and_all_parts_side_by_side():
    whole = torch.randn(4, 2, 3, dtype=torch.float64)  # of each process (2, 3)

    results = in_lockstep(4, lambda tp: (tp.all_reduce(whole[tp.rank]), tp.all_gather(whole[tp.rank])))

    for summed, gathered in results:
        assert torch.allclose(summed, whole.sum(0))
        assert torch.equal(gathered, torch.cat(list(whole), dim=-1))
