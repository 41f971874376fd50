"""What phases/04 asks about vLLM's grid of programs, answered by a scenario here."""

import torch

from minivllm.gpu.sgmv import LoRAKernelMeta
from tests.tools.device import DEVICE

ROWS, SLOTS, BLOCK = 33, 4, 16


def test_a_tile_list_launches_fewer_programs_than_a_grid_over_slots():
    token_slots = torch.tensor([-1] * 16 + [0] * 16 + [1])
    blocks_of_rows = -(-ROWS // BLOCK)
    meta = LoRAKernelMeta.make(SLOTS, ROWS, DEVICE)

    meta.prepare_tensors(token_slots)
    tiles = meta.meta_args(ROWS)

    assert blocks_of_rows * (SLOTS + 1) == 15, "every block of rows, for every slot and the base"
    assert tiles.block_rows == BLOCK
    assert tiles.count == 6
    assert (tiles.tiles[0, : tiles.count] >= 0).sum() == 2
