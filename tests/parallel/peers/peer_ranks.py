"""One of several processes that sum in memory of the host, by Triton's interpreter:

    python -m tests.parallel.peers.peer_ranks RANK SIZE FOLDER CASE

What it found is printed as JSON.
"""

import functools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from triton.runtime import interpreter

from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.norm import fused_add_rms_norm
from minivllm.gpu.kernels.update import Update
from minivllm.parallel.peers import exchange, gather_op, norm_op, sum_op
from minivllm.parallel.peers import group as peer_group
from minivllm.parallel.peers.group import PeerGroup
from tests.worlds.gpu import in_pages

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
        group._exchange.turns.fill_(exchange.ENDED.value)
    for seed in range(count):
        size, width = random.Random(seed).choice([(1, 8), (3, 24), (5, 200), (32, 32), (64, 32), (128, 8)])
        parts = [part.view(size, width) for part in terms(group.size, seed, size * width, torch.float32)]
        time.sleep(late.choice([0, 0, 0.003, 0.02]))
        if random.Random(seed).random() < 0.5:
            right += torch.equal(group.all_reduce(parts[group.rank].clone()), in_order(parts))
        else:
            right += torch.equal(group.all_gather(parts[group.rank]), torch.cat(parts, dim=-1))
    return {"right": right, "turns": turns_of(group)}


def all_kinds(group: PeerGroup, count: int) -> dict:
    """Sums, gathers and norms in no order, of many sizes. -> how many were right, how many norms were one kernel, and
    how many had adapters
    """
    right, normed, adapted = 0, 0, 0
    for seed in range(count):
        pick = random.Random(seed)
        rows, width = pick.choice([(4, 2048)] * 4 + [(1, 8), (3, 1000), (8, 64), (8, 1024), (5, 1640)])
        dtype = pick.choice([torch.float16, torch.float32, torch.float32])
        parts = [part.view(rows, width) for part in terms(group.size, seed, rows * width, dtype)]
        kind = pick.choice(["sum", "gather", "norm", "norm"])
        if kind == "sum":
            total = group.all_reduce(parts[group.rank].clone())
            right += torch.allclose(
                total, in_order(parts), rtol=0.0, atol=0.0 if total.nbytes <= group.most else 0.01
            )
        elif kind == "gather":
            right += torch.equal(group.all_gather(parts[group.rank]), torch.cat(parts, dim=-1))
        elif pick.random() < 0.3 and group._takes_rows(parts[group.rank]):
            right, adapted = right + norm_with_adapters(group, parts, seed), adapted + 1
        else:
            was_right, by_kernel = norm(group, parts, seed)
            right, normed = right + was_right, normed + by_kernel
    return {"right": right, "normed": normed, "adapted": adapted, "turns": turns_of(group)}


def turns_of(group: PeerGroup) -> list[int]:
    """Which halves programs use next."""
    return sorted(set(group._exchange.turns.tolist()))


def norm(group: PeerGroup, parts: list[torch.Tensor], seed: int) -> tuple[bool, bool]:
    """Whether the bits are those of a sum and then a norm, and whether they came by one kernel."""
    width = parts[0].shape[1]
    weight, residual = (t[0].to(parts[0]) for t in (terms(1, seed + 1, width, torch.float32), [parts[0] * 3]))
    expected_residual = residual.clone()
    expected = fused_add_rms_norm(in_order(parts), expected_residual, weight, 1e-5)
    found = group.add_and_norm(parts[group.rank].clone(), residual, weight, 1e-5)
    by_kernel = found is not None
    if not by_kernel:
        found = fused_add_rms_norm(group.all_reduce(parts[group.rank].clone()), residual, weight, 1e-5)
    near = 0.0 if by_kernel else 0.01
    pairs = (found, expected), (residual, expected_residual)
    is_right = all(torch.allclose(one, other, rtol=near, atol=near) for one, other in pairs)
    return is_right, by_kernel


def norm_with_adapters(group: PeerGroup, parts: list[torch.Tensor], seed: int) -> bool:
    """Whether the bits are those of a sum and then a norm that adds adapters with the sum of h."""
    (rows, width), rank = parts[0].shape, random.Random(seed).choice([3, 20])
    slots = torch.tensor([random.Random(seed + row).randrange(-1, 3) for row in range(rows)])
    ranks = torch.tensor([[rank, rank // 2, 0]], dtype=torch.int32)
    b = terms(1, seed + 2, 3 * width * rank, torch.float32)[0].view(3, width, rank).to(parts[0])
    h = [part.view(1, rows, rank) for part in terms(group.size, seed + 3, rows * rank, parts[0].dtype)]
    pieces = in_pages([b], ranks)
    weight, residual, others = parts[0][0], parts[0] * 3, parts[0] * 3
    expected = adapted_norm(
        Update(in_order([one.float() for one in h]), pieces),
        *(slots, weight, 1e-5, in_order(parts), others),
    )
    own = Update(h[group.rank], pieces), slots
    found = group.add_adapters_and_norm(*own, parts[group.rank], residual, weight, 1e-5)
    return torch.equal(found, expected) and torch.equal(residual, others)


def mix_up(rank: int, size: int) -> None:
    """Programs come in no order, the same on all ranks, and the last one reads late, in turns of ranks.

    On a GPU nothing orders them either.
    """
    begin, receive = interpreter.interpreter_builder.set_grid_idx, exchange.receive
    launches, is_last = 0, False

    def begin_another(x: int, y: int, z: int) -> None:
        nonlocal launches, is_last
        programs = interpreter.interpreter_builder.grid_dim[0]
        launches, is_last = launches + (x == 0), x == programs - 1
        begin(random.Random(launches).sample(range(programs), programs)[x], y, z)

    def receive_late(*args, **kwargs):
        time.sleep(0.03 if is_last and launches % size == rank else 0)
        return receive(*args, **kwargs)

    interpreter.interpreter_builder.set_grid_idx = begin_another
    for op in (sum_op, gather_op, norm_op):
        op.receive = receive_late


def other_way_round(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The mistake of a gather that takes each of two ranks' parts for the other's."""
    return lambda x, *args: gather(x, *args).roll(x.shape[-1], dims=-1)


def others(group: PeerGroup) -> dict:
    """What is not for the kernels: too large, of no such dtype, and no multiple of 16 bytes."""
    group._sum = group._gather = None
    cases = [(MOST // 4 + 4, torch.float32), (8, torch.int64), (7, torch.float32), (0, torch.float32)]
    found = [group.all_reduce(torch.full((n,), group.rank + 1, dtype=dtype)) for n, dtype in cases]
    total = sum(range(1, group.size + 1))
    right = [bool((one == total).all()) and len(one) == n for one, (n, _) in zip(found, cases)]
    ids = group.all_gather(torch.full((1, 8), group.rank))
    return {"right": right, "ids": ids.tolist() == [[rank for rank in range(group.size) for _ in range(8)]]}


def wide_norms(group: PeerGroup) -> dict:
    """What is not for the kernel of norms: too many rows, too wide ones, no multiple of 16 bytes, and other dtypes."""
    group._norm = None
    shapes = [
        ((9, 8), torch.float32),
        ((1, 4100), torch.float32),
        ((4, 6), torch.float32),
        ((1, 8), torch.float64),
    ]
    cases = [
        (size, dtype, [p.view(size) for p in terms(group.size, 1, size[0] * size[1], dtype)])
        for size, dtype in shapes
    ]
    return {"wide": [norm(group, parts, 5) for *_, parts in cases]}


def dies(group: PeerGroup, norms: bool) -> dict:
    """The last rank ends before a sum or a norm; the others are let go half a second later."""
    if group.rank == group.size - 1:
        os._exit(9)
    began = time.monotonic()
    threading.Timer(0.5, group.release).start()
    for rows in (1, 2, 1):
        x = torch.ones(rows, 1024)
        group._norm(x, x.clone(), x[0], 1e-5) if norms else group.all_reduce(x)
    return {"seconds": time.monotonic() - began}


def main(rank: int, size: int, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    most = 4 * MOST if case == "all kinds" else MOST
    peer_group.MOST_BYTES, peer_group.DTYPES = {2: most, 3: most}, DTYPES
    sum_op.peer_sum = functools.partial(sum_op.peer_sum, looks=2)  # each takes the interpreter long
    norm_op.peer_norm = functools.partial(norm_op.peer_norm, looks=2)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if case == "apart":
        peer_group.SECONDS_TO_TRY = 1.0
    if case == "gathers in the wrong order":
        gather_op.peer_gather = other_way_round(gather_op.peer_gather)
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
    if case == "all kinds":
        dist.barrier()
        mix_up(rank, size)
        found |= all_kinds(group, 80)
    if case == "wide norms":
        found |= wide_norms(group)
    if case.startswith("dies"):
        found |= dies(group, norms=case.endswith("norm"))
    print(json.dumps(found), flush=True)
    os._exit(0)  # some may have ended: nobody says goodbye


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
