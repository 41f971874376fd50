"""One of several processes that sum in memory of the host, by Triton's interpreter: peer_ranks.py RANK SIZE FOLDER CASE

What it found is printed as JSON.
"""

import functools
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from minivllm.distributed import peer_group, peer_sum_op
from minivllm.distributed.peer_group import PeerGroup

MOST = 8192  # bytes: the interpreter takes a while for a program
DTYPES = (torch.float16, torch.float32)  # the interpreter cuts bfloat16 off, where a GPU rounds


class FileMemory:
    """A file that all map. `refusal`: what opening is answered with; `alone`: others' are not opened."""

    def __init__(self, rank: int, folder: Path, refusal: str = "", alone: bool = False) -> None:
        self.rank, self.folder, self.refusal, self.alone = rank, folder, refusal, alone
        self.closed = False

    def offer(self, nbytes: int) -> bytes:
        path = self.folder / f"memory-{self.rank}"
        self.own = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        return str(path).encode()

    def open(self, offers: list[bytes]) -> list[int]:
        if self.refusal:
            raise RuntimeError(self.refusal)
        n = len(self.own)
        of = [torch.from_file(offer.decode(), shared=True, size=n, dtype=torch.uint8) for offer in offers]
        self.opened = [torch.zeros_like(one) for one in of] if self.alone else of
        self.opened[self.rank] = self.own
        return [one.data_ptr() for one in self.opened]

    def close(self) -> None:
        self.closed = True


def terms(size: int, seed: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for _ in range(size)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in float32, in the order of ranks, rounded once."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def sums(group: PeerGroup, count: int) -> dict:
    """Sums of many sizes while ranks are late in turns. -> how many were right, and how many by which way"""
    late, right, by_peers = random.Random(group.rank), 0, []
    by_kernel = group._sum
    group._sum = lambda x: by_peers.append(x.numel()) or by_kernel(x)
    for seed in range(count):
        dtype = DTYPES[seed % 2]
        n = random.Random(seed).choice([8, 24, 1000, 1024, 2048, 4096])
        parts = terms(group.size, seed, n, dtype)
        time.sleep(late.choice([0, 0, 0.003, 0.02]))
        before, total = len(by_peers), group.all_reduce(parts[group.rank].clone())
        if len(by_peers) > before:
            right += torch.equal(total, in_order(parts))
        else:
            right += torch.allclose(total.float(), torch.stack(parts).double().sum(0).float(), atol=0.01)
    return {"right": right, "by_peers": by_peers}


def both(group: PeerGroup, count: int, in_haste: bool) -> dict:
    """Sums and gathers of many sizes in turns, while ranks are late. -> how many were right

    in_haste   nobody waits for anybody
    """
    late, right = random.Random(group.rank), 0
    if in_haste:
        peer_sum_op._wait = triton.jit(goes_on)
    for seed in range(count):
        size, width = random.Random(seed).choice([(1, 8), (3, 24), (5, 200), (32, 32), (64, 32), (128, 8)])
        parts = [part.view(size, width) for part in terms(group.size, seed, size * width, torch.float32)]
        time.sleep(late.choice([0, 0, 0.003, 0.02]))
        if random.Random(seed).random() < 0.5:
            right += torch.equal(group.all_reduce(parts[group.rank].clone()), in_order(parts))
        else:
            right += torch.equal(group.all_gather(parts[group.rank]), torch.cat(parts, dim=-1))
    return {"right": right, "counts": sorted(set(group._counts.tolist()))}


def goes_on(flag_ptr, count, stop_ptr, LOOKS: tl.constexpr):
    pass


def others(group: PeerGroup) -> dict:
    """What is not for the kernel: too large, of no such dtype, and no multiple of 16 bytes."""
    group._sum = None
    cases = [(MOST // 4 + 4, torch.float32), (8, torch.int64), (7, torch.float32), (0, torch.float32)]
    found = [group.all_reduce(torch.full((n,), group.rank + 1, dtype=dtype)) for n, dtype in cases]
    total = sum(range(1, group.size + 1))
    return {"right": [bool((one == total).all()) and len(one) == n for one, (n, _) in zip(found, cases)]}


def dies(group: PeerGroup) -> dict:
    """The last rank ends before a sum; the others are let go half a second later."""
    if group.rank == group.size - 1:
        os._exit(9)
    threading.Timer(0.5, group.release).start()
    began = time.monotonic()
    for _ in range(3):
        group.all_reduce(torch.ones(2048))
    return {"seconds": time.monotonic() - began}


def main(rank: int, size: int, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    peer_group.MOST_BYTES, peer_group.DTYPES = {2: MOST, 3: MOST}, DTYPES
    peer_sum_op.peer_sum = functools.partial(peer_sum_op.peer_sum, looks=2)  # each takes the interpreter long
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if case == "apart":
        peer_group.SECONDS_TO_TRY = 1.0
    refusal = "cudaIpcOpenMemHandle: invalid argument (1)" if case == "refused" and rank == 1 else ""
    memory = FileMemory(rank, folder, refusal, alone=case == "apart")
    group = PeerGroup(memory, "cpu")
    found = {"is_on": group.is_on, "refusal": group.refusal}
    if case in ("refused", "apart", "sums"):
        found |= sums(group, 4 if case != "sums" else 40)
    if case == "sums":
        del group._sum
        found["others"] = others(group)
    if case in ("both", "both in haste"):
        dist.barrier()
        found |= both(group, 40, case == "both in haste")
    if case == "dies":
        found |= dies(group)
    print(json.dumps(found), flush=True)
    os._exit(0)  # some may have ended: nobody says goodbye


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
