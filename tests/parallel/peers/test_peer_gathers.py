"""Ranks that gather in each other's memory, between sums: on a CPU, by the kernel in Triton's interpreter."""

import pytest
import torch
from test_peer_sums import in_interpreter, peers_for, random_terms, run_ranks, sums_at

from minivllm.parallel.peers.gather_op import peer_gather
from tests.tools.device import DEVICE
from tests.worlds.peers import Peers, parts_of


def gathers_at(rank: int, parts: torch.Tensor, shape: tuple[int, ...], peers: Peers) -> torch.Tensor:
    """What a rank gathers, once all others have sent their parts.   parts: (ranks, n)"""
    for other in range(len(parts)):
        if other != rank:
            peers.post(other, rank, parts_of(parts[other]))
    return peer_gather(parts[rank].view(shape).to(DEVICE), peers.exchange_of(rank), looks=2).cpu()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 2, 172), (129, 8)], ids=str)
def test_every_rank_has_all_parts_side_by_side(size, dtype, shape):
    parts = random_terms(size, torch.Size(shape).numel(), dtype)
    expected = torch.cat([part.view(shape) for part in parts], dim=-1)

    found = [gathers_at(rank, parts, shape, peers_for(parts)) for rank in range(size)]

    assert all(torch.equal(one, expected) for one in found)


def test_what_is_no_number_travels_as_it_is_and_both_zeros_become_one():
    """+0.0 in a buffer means that nothing came yet, so zeros travel as -0.0, and all arrive as 0.0."""
    parts = torch.tensor([[float("nan"), -0.0, float("inf"), 1e-45, 0.0, -2.0, -0.0, 1.0]] * 2)
    parts.view(torch.int32)[:, 0] += torch.tensor([0, 1], dtype=torch.int32)  # NaNs of two kinds
    bits = parts.masked_fill(parts == 0, 0.0).view(torch.int32).flatten()

    for rank in range(2):
        found = gathers_at(rank, parts, (1, 8), peers_for(parts))

        assert torch.equal(found.view(torch.int32), bits[None])


def test_gathers_and_sums_take_turns_in_the_same_buffers():
    terms, parts = random_terms(2, 1032, torch.float32), random_terms(2, 8, torch.float32)
    peers = peers_for(terms)

    for _ in range(3):
        assert torch.equal(sums_at(0, terms, peers), terms.sum(0))
        assert torch.equal(gathers_at(0, parts, (1, 8), peers), parts.view(1, 16))

    # Of a buffer's two halves, the one that comes next: program 0 has had six turns, program 1 three, since it has
    # what lies beyond the first 4096 bytes, which sums alone have here.
    assert peers.turns[0].tolist() == [0, 1]


@in_interpreter
@pytest.mark.nightly
class TestProcesses:
    @pytest.mark.parametrize("size", [2, 3])
    def test_have_every_sum_and_every_gather_right_whoever_is_late(self, tmp_path, size):
        for code, found in run_ranks(size, tmp_path, "both"):
            assert code == 0 and found["is_on"] and found["right"] == 40  # of 40
            assert found["turns"] == [0, 1]  # the kernels ran: small exchanges leave the second program out

    def test_a_wrong_order_of_ranks_is_seen_when_the_engine_starts(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "gathers in the wrong order"):
            assert code == 0 and not found["is_on"]
            assert "gathers are wrong: " in found["refusal"] and "sums are wrong" not in found["refusal"]

    def test_without_waiting_some_are_wrong_so_the_first_of_these_tests_can_fail(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "both in haste"):
            assert code == 0 and found["is_on"]
        assert found["right"] < 40
