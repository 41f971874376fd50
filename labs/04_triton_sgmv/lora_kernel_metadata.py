"""Which rows a kernel's programs work on. Stands for vllm/lora/ops/triton_ops/lora_kernel_metadata.py (v0.22.1)."""

from __future__ import annotations

from labs.kit.overlay import Todo
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minivllm.gpu.sgmv.tuning import FEW_TOKENS, block_rows


class TileList(NamedTuple):
    """The rows of a batch, cut into tiles of one adapter each; all int32 on the kernels' device.

    rows        (T,) row numbers, sorted by slot, base rows last
    tiles       (3, capacity) of each tile: its slot, its first place in `rows`, how many rows; slot -1 = no tile
    count       tiles to launch: as many as T rows can need, so that a CUDA graph of T rows holds for any mixture
    block_rows  most rows of a tile
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    count: int
    block_rows: int


# region lab 4.1: the tile list
def build_tiles(
    token_slots: torch.Tensor, max_loras: int, capacity: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows by slot and cut each slot's run into tiles of at most `block_rows` rows.

    token_slots: (T,) int, -1 = base, in any order -> rows (T,) int64, tiles (3, capacity) int64 as in `TileList`

    Slots are in ascending order, a slot's rows in that of the batch; base rows come last and get no tile. All tiles
    of a slot but its last are full. Past the last tile the slot is -1, and the other two numbers may be anything.

    Nothing here asks the device for a value, so it may run on a GPU without stopping it.
    """
    raise Todo("lab 4.1: the tile list")


# endregion


@dataclass
class LoRAKernelMeta:
    """The tile list of a step, in buffers that stay where they are. vLLM: `LoRAKernelMeta`.

    vLLM keeps rows, a start and a length for every slot, and launches programs for each of them. A list of tiles
    launches only as many programs as T rows on S slots can need, however the rows spread; those past the last tile
    return at once.
    """

    max_loras: int
    rows: torch.Tensor
    tiles: torch.Tensor

    most_rows = staticmethod(block_rows)  # of a tile, where a step has so many tokens

    @classmethod
    def make(
        cls,
        max_loras: int,
        max_num_tokens: int,
        device: torch.device | str,
        captured_lora_counts: list[int] | None = None,
    ) -> LoRAKernelMeta:
        """Room for any batch of `max_num_tokens` rows.

        captured_lora_counts  of vLLM, which captures a graph for each; here one graph holds for any number
        """
        rows = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        sizes = max_num_tokens, min(max_num_tokens, FEW_TOKENS)
        longest = max(tile_count(n, max_loras, cls.most_rows(n)) for n in sizes)
        tiles = torch.full((3, longest), -1, dtype=torch.int32, device=device)
        return cls(max_loras, rows, tiles)

    def prepare_tensors(self, token_lora_mapping: torch.Tensor) -> None:
        """Take in the slots of a step's rows.

        token_lora_mapping: (T,) int, -1 = base. On the CPU it is sorted there and copied without waiting, on the
        GPU it is sorted there.
        """
        tokens = len(token_lora_mapping)
        most = self.most_rows(tokens)
        count = tile_count(tokens, self.max_loras, most)  # not all that there is room for: few steps need it
        rows, found = build_tiles(token_lora_mapping, self.max_loras, count, most)
        tiles = torch.full(self.tiles.shape, -1, dtype=torch.int32, device=found.device)
        tiles[:, :count] = found
        # Pageable memory: the copy is staged at once, so these tensors may go.
        self.rows[:tokens].copy_(rows.int(), non_blocking=True)
        self.tiles.copy_(tiles, non_blocking=True)

    def meta_args(self, token_nums: int, specialize_active_lora: bool = False) -> TileList:
        """What `lora_shrink` and `lora_expand` want between their tensors and their options.

        specialize_active_lora  of vLLM: not used: the launch depends on T and S alone
        """
        most = self.most_rows(token_nums)
        count = tile_count(token_nums, self.max_loras, most)
        return TileList(self.rows[:token_nums], self.tiles, count, most)


def tile_count(tokens: int, max_loras: int, most: int | None = None) -> int:
    """The most tiles that `tokens` rows need: full ones, and for each slot one that is not full.

    most   rows of a tile; None = by tokens
    """
    return min(tokens, tokens // (most or block_rows(tokens)) + min(max_loras, tokens))


def tiles_of(row_slots: torch.Tensor, max_loras: int) -> TileList:
    """The tile list of rows whose slots only the device knows, made there.   row_slots: (T,) int, -1 = base"""
    count, most = tile_count(len(row_slots), max_loras), block_rows(len(row_slots))
    rows, tiles = build_tiles(row_slots, max_loras, count, most)
    return TileList(rows.int(), tiles.int(), count, most)
