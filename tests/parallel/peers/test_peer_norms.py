"""Ranks that sum in each other's memory and norm in the same kernel: on a CPU, in Triton's interpreter."""

import functools

import pytest
import torch
from test_peer_sums import in_interpreter, run_ranks

from minivllm.gpu.kernels import norm
from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.paged_tuning import MOST_NORM_RANK
from minivllm.gpu.kernels.update import Update
from minivllm.parallel.peers.exchange import MOST_MORE
from minivllm.parallel.peers.norm_op import peer_norm, warps_of
from tests.tools.device import DEVICE
from tests.tools.memory import Guarded
from tests.worlds.gpu import in_pages
from tests.worlds.peers import Peers

NAN = float("nan")
EPS = 1e-3


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Ranks:
    """Ranks of which one norms at a time.

    x   (ranks, T, H)
    h   (ranks, T, r) of adapters, NaN where nothing is sent; None = there are none
    """

    def __init__(self, x: torch.Tensor, h: torch.Tensor | None = None) -> None:
        self.x, self.h = x.to(DEVICE), h

    def norm_at(self, rank: int, residual: torch.Tensor, weight: torch.Tensor, *of_adapters) -> torch.Tensor:
        """Others have sent theirs before. In the end they have the rank's own, and it has nothing left."""
        size, rows, _ = self.x.shape
        peers, expected = Peers(size, rows), Peers(size, rows)
        for other in range(size):
            if other != rank:
                peers.post(other, rank, self.x[other], self._sent_of_h(other))
                expected.post(rank, other, self.x[rank], self._sent_of_h(rank))
        x = Guarded(self.x[rank], gap=8, device=DEVICE).view
        found = peer_norm(x, residual, weight, EPS, peers.exchange_of(rank), *of_adapters, looks=2)
        assert peers.holds(expected) and peers.turns[rank].tolist() == [1] * rows
        return found

    def _sent_of_h(self, rank: int) -> list[torch.Tensor] | None:
        return None if self.h is None else [row[~row.isnan()].float() for row in self.h[rank]]


def in_order(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in their order, in float32, rounded once.   x: (ranks, T, H)"""
    return functools.reduce(torch.add, x.float()).to(x.dtype)


def terms(size, dtype, shape):
    """Of each rank one, so different that their order shows; a residual, and a weight.   shape: (T, H)"""
    scales = torch.tensor([1.0, 300.0, 0.01, 70.0])[:size, None, None]
    x, residual = (normal(size, *shape) * scales).to(dtype), (normal(*shape, seed=1) * 50).to(dtype)
    return x, residual, normal(shape[1], seed=2).to(dtype).to(DEVICE)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 8), (3, 1000), (9, 40), pytest.param((128, 40), marks=pytest.mark.nightly), (2, 4096)],
    ids=str,
)
def test_its_bits_are_those_of_a_sum_and_then_a_norm_on_all_ranks(size, dtype, shape):
    x, residual, weight = terms(size, dtype, shape)
    ranks, expected_residual = Ranks(x), residual.clone().to(DEVICE)
    expected = norm.fused_add_rms_norm(in_order(ranks.x), expected_residual, weight, EPS)

    for rank in range(size):
        stream = Guarded(residual, gap=8, device=DEVICE)
        found = ranks.norm_at(rank, stream.view, weight)

        assert torch.equal(found, expected) and torch.equal(stream.view, expected_residual)
        stream.assert_intact()


def test_it_is_the_norm_of_all_terms_and_the_residual():
    x, residual, weight = normal(3, 5, 72), normal(5, 72, seed=1), normal(72, seed=2)
    ranks, stream = Ranks(x), residual.clone().to(DEVICE)

    found = ranks.norm_at(2, stream, weight.to(DEVICE))

    total = x.double().sum(0) + residual
    expected = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    assert torch.allclose(stream.cpu().double(), total, atol=1e-6)
    assert torch.allclose(found.cpu().double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "dtype", "rank"),
    [(2, torch.float16, 8), (3, torch.float32, 20), (2, torch.float32, 32), (3, torch.float16, 7)],
    ids=str,
)
def test_adapters_are_added_once_to_the_sum_with_the_sum_of_their_h_on_all_ranks(size, dtype, rank):
    """The bits are those of a sum and then `adapted_norm`. Rows have ranks of 0, 1 and more, or none."""
    shape, slots = (5, 1000), torch.tensor([0, -1, 3, 2, 1], device=DEVICE)
    x, residual = normal(size, *shape).to(dtype) * 3, normal(*shape, seed=1).to(dtype)
    b, weight = (normal(*of, seed=3).to(dtype).to(DEVICE) for of in ((4, shape[1], rank), shape[1:]))
    live_ranks = torch.tensor([[rank, 0, 1, rank - 1]], dtype=torch.int32, device=DEVICE)
    live = torch.where(slots < 0, 0, live_ranks[0, slots.clamp(min=0)])
    dead = torch.arange(rank, device=DEVICE) >= live[:, None]
    h = normal(size, 5, rank, seed=2).to(dtype).to(DEVICE).masked_fill(dead, NAN)
    expected_residual = residual.clone().to(DEVICE)
    pieces = in_pages([b], live_ranks)
    ranks = Ranks(x, h)
    update = Update(functools.reduce(torch.add, h.float())[None], pieces)
    expected = adapted_norm(update, slots, weight, EPS, in_order(ranks.x), expected_residual)

    for tp_rank in range(size):
        stream = Guarded(residual, gap=8, device=DEVICE)
        found = ranks.norm_at(tp_rank, stream.view, weight, Update(h[tp_rank][None], pieces), slots)

        assert torch.equal(found, expected) and torch.equal(stream.view, expected_residual)
        stream.assert_intact()


def test_there_is_room_for_every_rank_of_h_that_norms_add():
    assert MOST_MORE >= MOST_NORM_RANK


@pytest.mark.parametrize("width", [8, 576, 1000, 2048, 4096, 8192, 16384])
def test_squares_are_summed_by_as_many_threads_as_in_the_norms_own_kernel(width):
    _, block, warps = norm._launch_sizes(torch.empty(1, width, device="meta"))

    assert warps_of(block) == warps


@in_interpreter
@pytest.mark.nightly
class TestProcesses:
    @pytest.mark.parametrize("size", [2, 3])
    def test_have_sums_gathers_and_norms_of_all_sizes_right_in_any_order(self, tmp_path, size):
        for code, found in run_ranks(size, tmp_path, "all kinds"):
            assert code == 0 and found["is_on"] and found["right"] == 80
            assert found["normed"] == 25 and found["adapted"] == 11
            assert found["turns"] == [0, 1]  # programs of high numbers have had fewer turns

    def test_sum_first_where_rows_are_too_many_or_too_wide_or_odd(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "wide norms"):
            assert code == 0 and found["wide"] == [[True, False]] * 4  # right, and not by the kernel

    def test_are_let_go_when_one_has_ended(self, tmp_path):
        *left, (last, _) = run_ranks(3, tmp_path, "dies before a norm")

        assert last == 9
        for code, found in left:
            assert code == 0 and found["is_on"] and found["seconds"] > 0.4
