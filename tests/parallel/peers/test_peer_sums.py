"""Ranks that sum in each other's memory: on a CPU, by the kernel in Triton's interpreter, in a file that all map."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.config import ParallelConfig
from minivllm.parallel.peers import memory as peer_memory
from minivllm.parallel.peers.sum_op import Meetings, peer_sum, programs_of
from minivllm.parallel.ranks import make_group
from tests.tools.device import DEVICE, compile_for_gpu
from tests.worlds.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
in_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has its own memory")


class Ranks:
    """What each of `size` ranks has, without processes: terms are where they would be once all have come."""

    def __init__(self, terms: torch.Tensor, begun: int = 0) -> None:
        size = len(terms)
        self.half = terms[0].nbytes
        self.terms = terms.to(DEVICE)
        self.rooms = [term.repeat(2, 1) for term in self.terms]
        self.flags = [torch.full((programs_of(self.half), size), begun, dtype=torch.int32) for _ in terms]
        self.flags = [flags.to(DEVICE) for flags in self.flags]
        self.sums = [
            torch.full((len(flags),), begun, dtype=torch.int32, device=DEVICE) for flags in self.flags
        ]
        self.stop = torch.zeros(1, dtype=torch.int32)
        if DEVICE == "cuda":
            self.stop = self.stop.pin_memory()

    def sum_at(self, rank: int) -> torch.Tensor:
        tables = [
            torch.tensor([t.data_ptr() for t in them], device=DEVICE) for them in (self.rooms, self.flags)
        ]
        meetings = Meetings(*tables, self.sums[rank], self.stop, self.half, rank)
        return peer_sum(self.terms[rank], meetings, looks=2)

    def tell_all(self, count: int) -> None:
        """All have begun that many sums."""
        for flags in self.flags:
            flags.fill_(count)


def random_terms(size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Of unlike magnitudes, so that their order shows."""
    values = torch.randn(size, n, generator=torch.Generator().manual_seed(n))
    return (values * torch.tensor([1.0, 300.0, 0.01, 70.0])[:size, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_ranks_add_in_the_same_order_and_have_the_same_bits(dtype):
    terms = random_terms(4, 1032, dtype)
    ranks = Ranks(terms)
    ranks.tell_all(1)

    totals = [ranks.sum_at(rank) for rank in range(4)]

    expected = torch.zeros(1032)
    for term in terms:
        expected += term.float()
    assert not torch.equal(expected, terms.flip(0).float().cumsum(0)[-1])  # the order does show
    assert all(torch.equal(total.cpu(), expected.to(dtype)) for total in totals)


def test_counts_go_past_the_largest_integer():
    last = 2**31 - 1
    ranks = Ranks(random_terms(2, 8, torch.float32), begun=last - 1)
    expected = ranks.terms.sum(0)

    for count in (last, -(2**31), 1 - 2**31):
        ranks.tell_all(count)
        assert torch.equal(ranks.sum_at(0), expected)
        assert ranks.sums[0].tolist() == [count]


def test_who_is_told_to_stop_waits_for_nobody():
    ranks = Ranks(random_terms(2, 8, torch.float32))
    ranks.stop.fill_(1)

    for count in (1, 2):
        ranks.sum_at(0)  # rank 1 never comes

        assert ranks.sums[0].tolist() == [count] and ranks.flags[1].tolist() == [[count, 0]]


def test_who_was_told_to_stop_asks_the_host_once_and_not_again_for_every_sum():
    ranks = Ranks(random_terms(3, 8, torch.float32), begun=2**31 - 1)  # which counts past the largest
    ranks.flags[0].copy_(torch.tensor([[0, -(2**31), 2**31 - 1]]))  # rank 1 has come, rank 2 never does
    ranks.stop.fill_(1)

    ranks.sum_at(0)

    assert ranks.sums[0].tolist() == [-(2**31)]
    assert ranks.flags[0].tolist() == [[0, -(2**31), -(2**30)]]  # 2**30 sums from now


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
    if DEVICE == "cuda":
        pytest.skip("it has one")
    memory = peer_memory.CudaIpc(rank=0)

    with pytest.raises(RuntimeError, match="libcudart: this PyTorch has none"):
        memory.offer(4096)
    memory.close()  # nothing was taken


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


@in_interpreter
@pytest.mark.nightly
class TestProcesses:
    @pytest.mark.parametrize("size", [2, 3])
    def test_have_the_same_bits_whoever_is_late(self, tmp_path, size):
        for code, found in run_ranks(size, tmp_path, "sums"):
            assert code == 0 and found["is_on"] and found["right"] == 40
            assert 20 < len(found["by_peers"]) < 40 and max(found["by_peers"]) == 4096
            assert found["others"] == {"right": [True] * 4}

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
