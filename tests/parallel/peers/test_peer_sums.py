"""Ranks that sum in each other's memory: on a CPU, by the kernel in Triton's interpreter, in a file that all map."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minivllm.config import ParallelConfig
from minivllm.parallel.peers import memory as peer_memory
from minivllm.parallel.peers.exchange import ENDED
from minivllm.parallel.peers.group import PeerGroup
from minivllm.parallel.peers.sum_op import peer_sum, programs_of
from minivllm.parallel.ranks import make_group
from minivllm.parallel.tensor_parallel import TensorParallel
from tests.tools.device import DEVICE, compile_for_gpu
from tests.worlds.peers import Peers, parts_of
from tests.worlds.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
in_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has its own memory")


def sums_at(rank: int, terms: torch.Tensor, peers: Peers) -> torch.Tensor:
    """What a rank has as the sum, once all others have sent their terms.   terms: (ranks, n)"""
    for other in range(len(terms)):
        if other != rank:
            peers.post(other, rank, parts_of(terms[other]))
    return peer_sum(terms[rank].to(DEVICE), peers.exchange_of(rank), looks=2).cpu()


def peers_for(terms: torch.Tensor) -> Peers:
    return Peers(len(terms), programs_of(terms[0].nbytes))


def random_terms(size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Of unlike magnitudes, so that their order shows; some are 0, or -0.0."""
    values = torch.randn(size, n, generator=torch.Generator().manual_seed(n))
    values = values * (values.abs() > 0.1)
    return (values * torch.tensor([1.0, 300.0, 0.01, 70.0])[:size, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_ranks_add_in_the_same_order_and_have_the_same_bits(dtype):
    terms = random_terms(4, 1032, dtype)
    expected = torch.zeros(1032)
    for term in terms:
        expected += term.float()
    assert not torch.equal(expected, terms.flip(0).float().cumsum(0)[-1])  # the order does show

    totals = [sums_at(rank, terms, peers_for(terms)) for rank in range(4)]

    bits = expected.to(dtype).view(torch.int16)
    assert all(torch.equal(total.view(torch.int16), bits) for total in totals)


def test_a_rank_leaves_its_term_at_all_others_and_zeros_at_its_own_place():
    terms = random_terms(3, 1032, torch.float32)
    peers, expected = peers_for(terms), peers_for(terms)
    expected.post(1, 0, parts_of(terms[1]))
    expected.post(1, 2, parts_of(terms[1]))

    sums_at(1, terms, peers)

    assert peers.holds(expected)
    assert peers.turns[1].tolist() == [1, 1] and peers.turns[0].tolist() == [0, 0]


def test_a_rank_that_is_a_sum_ahead_disturbs_no_other():
    of_sums = [random_terms(2, 1032, torch.float32) * (i + 1) for i in range(5)]
    peers = peers_for(of_sums[0])

    for terms, following in zip(of_sums, [*of_sums[1:], of_sums[0]]):
        peers.post(1, 0, parts_of(following[1]), ahead=1)
        assert torch.equal(sums_at(0, terms, peers), terms.sum(0))


def test_who_is_told_to_stop_waits_for_nobody_and_does_not_ask_again():
    terms = random_terms(3, 8, torch.float32)
    peers = peers_for(terms)
    peers.stop.fill_(1)

    peer_sum(terms[0].to(DEVICE), peers.exchange_of(0), looks=2)  # nobody sends anything
    peers.stop.fill_(0)
    peer_sum(terms[0].to(DEVICE), peers.exchange_of(0), looks=2)

    assert peers.turns[0].tolist() == [ENDED.value]


@pytest.mark.nightly
def test_the_kernel_compiles_for_a_gpu_also_where_none_is(tmp_path):
    done = compile_for_gpu("sum", cache=tmp_path)

    assert done.stdout == "compiled\n", done.stderr


def test_gpus_share_memory_unless_that_is_disabled(monkeypatch):
    monkeypatch.setattr("minivllm.parallel.ranks.ProcessGroup", lambda: None)
    monkeypatch.setattr("minivllm.parallel.ranks.make_peer_group", lambda device: f"peers on {device}")

    def made(device, **options):
        return make_group(device, ParallelConfig(2, **options))

    assert made("cuda:0") == "peers on cuda:0"
    assert made("cuda:0", disable_custom_all_reduce=True) is None and made("cpu") is None


class FakeRuntime:
    """The CUDA runtime's calls, each a success but one. Links to GPUs have atomics, or not."""

    def __init__(self, refused: str = "", has_atomics: bool = True) -> None:
        self.refused, self.has_atomics, self.called = refused, has_atomics, []
        self.links: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: self.called.append(name) or (1 if name == self.refused else 0)

    def cudaGetDevice(self, device: Any) -> int:
        device._obj.value = 3
        return 0

    def cudaDeviceGetP2PAttribute(self, value: Any, attribute: int, own: int, other: int) -> int:
        assert attribute == 3  # cudaDevP2PAttrNativeAtomicSupported
        self.links.append((own, other))
        value._obj.value = int(self.has_atomics)
        return 0

    def cudaGetErrorString(self, code: int) -> bytes:
        return b"invalid argument"


@pytest.mark.parametrize("refused", ["cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"])
def test_a_refusal_names_the_call_and_what_was_taken_is_given_back(monkeypatch, refused):
    runtime = FakeRuntime(refused)
    monkeypatch.setattr(peer_memory, "cuda_runtime", lambda: runtime)
    memory = peer_memory.CudaIpc(rank=0)

    with pytest.raises(RuntimeError, match=rf"^{refused}: invalid argument \(1\)$"):
        memory.open([memory.offer(4096), bytes(64)])
    memory.close()

    assert runtime.called.count("cudaFree") == (refused != "cudaMalloc")


def test_memory_behind_a_link_without_atomic_operations_is_not_opened(monkeypatch):
    runtimes = [FakeRuntime(has_atomics=has) for has in (True, False)]
    kept, refused = (peer_memory.CudaIpc(rank=1) for _ in runtimes)

    monkeypatch.setattr(peer_memory, "cuda_runtime", lambda: runtimes[0])
    kept.open([bytes(64), kept.offer(4096), bytes(64)])
    monkeypatch.setattr(peer_memory, "cuda_runtime", lambda: runtimes[1])
    with pytest.raises(RuntimeError, match=r"^GPU 3 and GPU 2: their link has no atomic operations$"):
        refused.open([bytes(64), refused.offer(4096), bytes(64)])

    assert runtimes[0].links == [(3, 2), (3, 4)] and runtimes[0].called.count("cudaIpcOpenMemHandle") == 2
    assert runtimes[1].links == [(3, 2)] and "cudaIpcOpenMemHandle" not in runtimes[1].called


def test_a_process_without_the_cuda_runtime_says_so():
    if torch.version.cuda:
        pytest.skip("this PyTorch brings it")
    memory = peer_memory.CudaIpc(rank=0)

    with pytest.raises(RuntimeError, match="libcudart: this PyTorch has none"):
        memory.offer(4096)
    memory.close()  # nothing was taken


class NoMemory:
    """Memory that a driver does not share."""

    def offer(self, nbytes: int) -> bytes:
        raise OSError("no such device")

    def close(self) -> None:
        pass


def test_a_rank_that_cannot_share_memory_tells_the_others_which_wait_for_it(monkeypatch):
    told = []

    def gather(results: list, own: Any) -> None:
        told.append(own)
        results[:] = [own, (b"an offer", "")]

    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)

    group = PeerGroup(NoMemory(), "cpu")

    assert told == [(None, "rank 0: no such device")]
    assert not group.is_on and group.refusal == "rank 0: no such device"


def run_ranks(size: int, folder: Path, case: str) -> list[tuple[int, dict]]:
    """(exit code, what it found) of each rank."""
    script = [sys.executable, "-m", "tests.parallel.peers.peer_ranks"]
    started = [
        subprocess.Popen(
            [*script, str(rank), str(size), str(folder), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(size)
    ]
    try:
        ended = [process.communicate(timeout=3 * PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    for (_, err), process in zip(ended, started):
        assert process.returncode in (0, 9), err
    return [(process.returncode, json.loads(out or "{}")) for process, (out, _) in zip(started, ended)]


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_looks_up_its_own_tokens_and_has_zeros_for_those_of_others(rank):
    table, ids = (
        random_terms(4, 11 * 8, torch.float32).view(44, 8)[:42] + 1,
        torch.tensor([0, 13, 14, 27, 28, 41, 13]),
    )
    own = slice(14 * rank, 14 * rank + 14)
    expected = table[ids] * ((ids >= own.start) & (ids < own.stop))[:, None]

    found = PeerGroup.look_up_own(TensorParallel(rank, 3), ids, table[own])

    assert torch.equal(found, expected)


@in_interpreter
@pytest.mark.nightly
class TestProcesses:
    @pytest.mark.parametrize("size", [2, 3])
    def test_have_the_same_bits_whoever_is_late(self, tmp_path, size):
        for code, found in run_ranks(size, tmp_path, "sums"):
            assert code == 0 and found["is_on"] and found["right"] == 40
            assert 20 < len(found["by_peers"]) < 40 and max(found["by_peers"]) == 4096
            assert found["others"] == {"right": [True] * 4, "ids": True}

    def test_all_go_the_other_way_if_one_cannot_share_memory(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "refused"):
            assert code == 0 and not found["is_on"] and found["right"] == 4 and found["by_peers"] == []
            assert found["refusal"] == "rank 1: cudaIpcOpenMemHandle: invalid argument (1)"

    def test_all_go_the_other_way_if_they_do_not_find_each_other_in_it(self, tmp_path):
        for code, found in run_ranks(2, tmp_path, "apart"):
            assert code == 0 and not found["is_on"] and found["right"] == 4 and found["by_peers"] == []
            assert (
                "rank 0: sums are wrong: " in found["refusal"]
                and "rank 1: sums are wrong" in found["refusal"]
            )

    def test_are_let_go_when_one_has_ended(self, tmp_path):
        *left, (last, _) = run_ranks(3, tmp_path, "dies")

        assert last == 9
        for code, found in left:
            assert code == 0 and found["is_on"] and found["seconds"] > 0.4
