"""Inputs of a step of prompts and decodes at fixed addresses. Stands for `InputBuffers` of vllm/v1/worker (v0.22.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minivllm.gpu.block_tables import BlockTables
from minivllm.gpu.paged_attention import TiledAttentionMetadata, query_tiles


class MixedFields(NamedTuple):
    """The parts of one copy for a graph of T tokens; P rows at most sample, W blocks has the longest context.

    input_ids, positions, slot_mapping  (T,) int64
    last_rows                           (P,) int64, where among the T tokens those are that sample; padding is 0
    tiles                               (4, capacity) int32, as `mixed_attention` wants them
    tables                              block tables end to end, int32, as narrow as they may be
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    last_rows: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor


class MixedBuffers:
    """What a CUDA graph of any step reads, refilled before each replay.

    A fill goes to the device in one copy, as that of `DecodeBuffers` does. Padding is a row like the others: it stands
    before position 0, so that it attends to nothing, and writes to slot 0 of the null block.

    max_tokens, max_rows   of a step
    tile_tokens            most tokens of a tile of queries: `queries_per_tile`
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        tile_tokens: int,
        device: torch.device | str,
    ) -> None:
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.block_size, self.tile_tokens = block_size, tile_tokens
        words = self._words(max_tokens) + -(-max_rows * max_blocks // 2)
        self._host = torch.zeros(words, dtype=torch.int64)
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._host_tables = BlockTables(max_rows, max_blocks)

    def rows_of(self, size: int) -> int:
        """P, the rows that a graph of so many tokens samples from."""
        return min(size, self.max_rows)

    def fields(self, size: int) -> MixedFields:
        """What a graph of so many tokens reads, on the device."""
        return self._fields(self._device, size)

    def attention(self, size: int) -> TiledAttentionMetadata:
        fields = self.fields(size)
        return TiledAttentionMetadata(fields.slot_mapping, fields.tiles, self.block_tables)

    def fill(
        self,
        token_ids: Sequence[int],
        query_lens: np.ndarray,
        starts: np.ndarray,
        block_tables: Sequence[list[int]],
        last_rows: Sequence[int],
        size: int,
    ) -> None:
        """Write a step of n tokens in R requests, pad it to `size` tokens, and start the copy to the device.

        token_ids            n, the requests' new tokens end to end
        query_lens, starts   (R,) int64, how many each has, and the position of its first
        block_tables         R, each at least as long as the context
        last_rows            at most P
        """
        n, requests = len(token_ids), len(query_lens)
        ids, positions, slots, lasts, tiles, tables = (
            field.numpy() for field in self._fields(self._host, size)
        )
        for field, used in ((ids, n), (positions, n), (slots, n), (lasts, len(last_rows))):
            field[used:] = 0
        ids[:n], lasts[: len(last_rows)] = token_ids, last_rows
        row_starts = np.cumsum(query_lens) - query_lens
        owners = np.repeat(np.arange(requests), query_lens)
        positions[:n] = np.arange(n) + (starts - row_starts)[owners]
        self._host_tables.read(block_tables)
        blocks = (int((starts + query_lens).max()) - 1) // self.block_size + 1
        rows = self._host_tables.rows
        tables[: requests * blocks].reshape(requests, blocks)[:] = rows[:requests, :blocks]
        block_ids = rows[owners, positions[:n] // self.block_size].astype(np.int64)
        slots[:n] = block_ids * self.block_size + positions[:n] % self.block_size
        found = query_tiles(np.append(query_lens, size - n), np.append(starts, n - size), self.tile_tokens)
        tiles[:, : found.shape[1]] = found
        tiles[2, found.shape[1] :] = 0
        self._copy(size, requests, blocks)

    def _capacity(self, size: int) -> int:
        """The most tiles that so many tokens need: full ones, one that is not for each request, and for padding."""
        return size // self.tile_tokens + self.rows_of(size) + 1

    def _words(self, size: int) -> int:
        """Of int64 before the block tables."""
        return 3 * size + self.rows_of(size) + 2 * self._capacity(size)

    def _fields(self, words: torch.Tensor, size: int) -> MixedFields:
        rows, capacity = self.rows_of(size), self._capacity(size)
        lengths = [size, size, size, rows, 2 * capacity]
        *fields, tiles, tables = words.split([*lengths, len(words) - sum(lengths)])
        tiles, tables = tiles.view(torch.int32).view(4, capacity), tables.view(torch.int32)
        return MixedFields(*fields, tiles, tables)

    def _copy(self, size: int, requests: int, blocks: int) -> None:
        words = self._words(size) + -(-requests * blocks // 2)
        self._device[:words].copy_(self._host[:words], non_blocking=True)
        narrow = self.fields(size).tables[: requests * blocks].view(requests, blocks)
        self.block_tables[:requests, :blocks].copy_(narrow)
