"""Ranks that gather in each other's memory, between sums: on a CPU, by the kernel in Triton's interpreter."""

import pytest
import torch
from test_peer_sums import Ranks, in_interpreter, random_terms, run_ranks

from minivllm.parallel.peers.gather_op import peer_gather
from minivllm.parallel.peers.sum_op import Meetings
from tests.tools.device import DEVICE


def gather_at(ranks: Ranks, rank: int, part: torch.Tensor) -> torch.Tensor:
    tables = [
        torch.tensor([t.data_ptr() for t in them], device=DEVICE) for them in (ranks.rooms, ranks.flags)
    ]
    meetings = Meetings(*tables, ranks.sums[rank], ranks.stop, ranks.half, rank)
    return peer_gather(part, meetings, looks=2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 2, 172), (129, 8)], ids=str)
def test_every_rank_has_all_parts_side_by_side(size, dtype, shape):
    parts = (random_terms(size, torch.Size(shape).numel(), torch.float32) * 7).to(dtype)
    ranks = Ranks(parts)
    ranks.tell_all(1)

    found = [gather_at(ranks, rank, ranks.terms[rank].view(shape)) for rank in range(size)]

    expected = torch.cat([part.view(shape) for part in parts], dim=-1)
    assert all(one.dtype == dtype and torch.equal(one.cpu(), expected) for one in found)


def test_what_is_no_number_travels_as_it_is():
    parts = torch.tensor([[float("nan"), -0.0, float("inf"), 1e-45]] * 2)
    bits = parts.view(torch.int32) + torch.tensor([[0], [1]], dtype=torch.int32)  # NaNs of two kinds
    ranks = Ranks(bits.view(torch.float32))
    ranks.tell_all(1)

    found = gather_at(ranks, 1, ranks.terms[1][None])

    assert torch.equal(found.cpu().view(torch.int32), bits.flatten()[None])


def test_a_gather_counts_as_a_sum_does():
    ranks = Ranks(random_terms(2, 1032, torch.float32))
    ranks.tell_all(4)

    for _ in range(2):
        ranks.sum_at(0)
        gather_at(ranks, 0, ranks.terms[0][:8].view(1, 8))

    assert ranks.sums[0].tolist() == [4] + [2] * (len(ranks.sums[0]) - 1)
    assert ranks.flags[1][:, 0].tolist() == ranks.sums[0].tolist()


@in_interpreter
@pytest.mark.nightly
class TestProcesses:
    @pytest.mark.parametrize("size", [2, 3])
    def test_have_every_sum_and_every_gather_right_whoever_is_late(self, tmp_path, size):
        for code, found in run_ranks(size, tmp_path, "both"):
            assert code == 0 and found["is_on"] and found["right"] == 40
            assert len(found["counts"]) > 1  # programs of high numbers have met less often

    def test_a_wrong_order_of_ranks_is_seen_when_the_engine_starts(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "gathers in the wrong order"):
            assert code == 0 and not found["is_on"]
            assert "gathers are wrong: " in found["refusal"] and "sums are wrong" not in found["refusal"]

    def test_who_waits_for_nobody_is_seen(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "both in haste"):
            assert code == 0 and found["is_on"]
        assert found["right"] < 40
