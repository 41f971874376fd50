"""Pages and KV blocks whose offsets do not fit in 32 bits, as on a GPU of 80 GB they all but never do.

The memory is a file of which little is there. An offset that has lost its upper bits leads to zeros: there is as much
memory before the first page as behind it.
"""

import pytest
import torch

from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.adapted_silu_op import adapted_silu
from minivllm.gpu.kernels.attention import paged_attention
from minivllm.gpu.kernels.paged_expand_op import paged_expand
from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.kernels.paged_shrink_op import ShrinkRoom, paged_shrink
from minivllm.gpu.kernels.paged_tuning import paged_shrink_tiles
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.kernels.write_pages_op import write_pages
from minivllm.gpu.sgmv.lora_kernel_metadata import tiles_of
from tests.tools.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory is taken when it is asked for")
FAR = 2**31  # elements
CLOSE = 4e-3  # float16, as a share of the largest value


@pytest.fixture
def memory(tmp_path):
    file = tmp_path / "memory"
    found = torch.from_file(str(file), shared=True, size=2 * FAR + 2**20, dtype=torch.float16)
    file.unlink()  # the memory stays
    return found[FAR:]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def assert_close(found, expected):
    assert (found.double() - expected).abs().max() <= CLOSE * expected.abs().max()


def test_pages_are_written_and_read_where_they_are(memory):
    width, inner, rank, page_ranks, stride = 16, 8, 12, 4, FAR // 2
    a = [random(rank, width, seed=i) for i in range(2)]
    b = [random(inner, rank, seed=2 + i) for i in range(2)]
    firsts = (0, 64, 128, 160)  # in a page: A of gate and up, B of gate and up
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    live = torch.full((2, 1), rank, dtype=torch.int32)
    pieces = PagedPieces(
        memory, table, live, rank, page_ranks, stride, 1, firsts[:2], firsts[2:], (width,) * 2, (inner,) * 2
    )
    tensors = [*a, *b]
    ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0).tolist()
    sources = [[end - tensor.numel(), *tensor.shape] for end, tensor in zip(ends, tensors)]
    places = [
        [memory.data_ptr() + 2 * first, stride, size, is_b, page_ranks]
        for first, size, is_b in zip(firsts, (width, width, inner, inner), (0, 0, 1, 1))
    ]
    x, y = random(3, width, seed=4), random(3, 2 * inner, seed=5)
    tiles = tiles_of(torch.tensor([0, -1, 0]), 1)
    tuned = paged_shrink_tiles(3, width, rank)

    weights = torch.cat([tensor.flatten() for tensor in tensors])
    write_pages(weights, torch.tensor(sources), torch.tensor(places), table[0], rank * width)
    room = ShrinkRoom.make(x, pieces, torch.zeros(8, dtype=torch.int32), tuned)
    h = paged_shrink(x, pieces, tiles, room, tuned)
    activated, added = adapted_silu(Update(h, pieces), y, tiles), y.clone()
    paged_expand(h, pieces, added, tiles)
    of_gate, stream = Update(h[:1], pieces.of(slice(1))), torch.zeros(3, inner).half()
    slots = torch.tensor([0, -1, 0])
    adapted_norm(of_gate, slots, torch.ones(inner).half(), 1e-5, y[:, :inner], stream)

    expected = y.double()
    for i in range(2):
        columns = slice(i * inner, (i + 1) * inner)
        expected[[0, 2], columns] += x[[0, 2]].double() @ a[i].double().T @ b[i].double().T
    gate, up = expected.chunk(2, dim=1)
    assert_close(added, expected)
    assert_close(stream, gate)
    assert_close(activated, torch.nn.functional.silu(gate) * up)


def test_kv_blocks_are_written_and_read_where_they_are(memory):
    block_size, size, length = 4, 16, 6
    far_block = FAR // (block_size * 2 * size)
    cache = memory[: (far_block + 2) * block_size * 2 * size].view(-1, block_size, 2, size)
    blocks = [far_block, far_block + 1]
    slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(length)])
    heads = random(length, 3, size, seed=6)  # one query head, a key, a value
    no_angle = torch.ones(length, 1, size), torch.zeros(length, 1, size)

    rotary_and_cache(heads, *no_angle, slots, cache)
    tables = torch.tensor([blocks], dtype=torch.int32)
    of_prompt, of_decode = torch.empty(2, length, size)
    for out, tile, tokens in (
        (of_prompt, [0, 0, length, 0], length),
        (of_decode, [0, length - 1, 1, length - 1], 1),
    ):
        tiles = torch.tensor(tile, dtype=torch.int32)[:, None]
        paged_attention(heads[:, :1], cache, tiles, tokens, tables, length, 0.25, out)

    q, k, v = heads.double().unbind(1)
    scores = (q @ k.T * 0.25).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = scores.softmax(dim=1) @ v
    assert_close(of_prompt, expected)
    assert_close(of_decode[-1], expected[-1])
