"""Inputs of captured steps at fixed addresses.

Stands for `InputBuffers` of vllm/v1/worker/gpu_input_batch.py and `BlockTable` of block_table.py (v0.22.1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minivllm.gpu.paged_attention import PagedAttentionMetadata, QueryTiles, query_tiles


class StepShape(NamedTuple):
    """What all steps have in common that one graph runs.

    tokens       T
    rows         P, the rows that sample
    tile_tokens  most tokens of a tile of queries: 1 for decodes, or `queries_per_tile`
    """

    tokens: int
    rows: int
    tile_tokens: int

    @property
    def tiles(self) -> int:
        """The most that so many tokens need: full ones, and one that is not for each request and for padding."""
        return self.tokens if self.tile_tokens == 1 else self.tokens // self.tile_tokens + self.rows + 1

    @property
    def words(self) -> int:
        """Of int64, all fields but the block tables."""
        return 3 * self.tokens + self.rows + 2 * self.tiles


class StepFields(NamedTuple):
    """The parts of one copy.

    input_ids, positions, slot_mapping  (T,) int64
    last_rows                           (P,) int64, where among the T tokens those are that sample; padding is 0
    tiles                               (4, tiles) int32, as `paged_attention` wants them
    tables                              block tables end to end, int32, as narrow as they may be
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    last_rows: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor


class StepBuffers:
    """What a CUDA graph of any step reads, refilled before each replay. vLLM: `InputBuffers`, `BlockTables`.

    A fill is written into pageable memory and goes to the device in one copy: the driver stages it before the call
    returns, so the next fill may overwrite it. Block tables travel as narrow as the step's longest context allows, and
    the device puts them into their fixed place. Padding is a row like the others: it stands before position 0, so that
    it attends to nothing, and writes to slot 0 of the null block.

    shapes         of all graphs
    max_blocks     W, of the longest context
    block_tables   (most rows, W) int32 on the device
    """

    def __init__(
        self, shapes: Sequence[StepShape], max_blocks: int, block_size: int, device: torch.device | str
    ) -> None:
        self.block_size = block_size
        max_rows = max((shape.rows for shape in shapes), default=0)
        words = max((shape.words for shape in shapes), default=0) + -(-max_rows * max_blocks // 2)
        self._host = torch.zeros(words, dtype=torch.int64)
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._host_tables = BlockTables(max_rows, max_blocks)
        self._host_fields: dict[StepShape, list[np.ndarray]] = {}
        self._device_fields: dict[StepShape, StepFields] = {}

    def fields(self, shape: StepShape) -> StepFields:
        """What a graph of this shape reads, on the device."""
        if shape not in self._device_fields:
            self._device_fields[shape] = _split(self._device, shape)
        return self._device_fields[shape]

    def attention(self, shape: StepShape, max_seq_len: int) -> PagedAttentionMetadata:
        """max_seq_len: no context will be longer"""
        fields = self.fields(shape)
        tiles = QueryTiles(fields.tiles, shape.tile_tokens)
        return PagedAttentionMetadata(fields.slot_mapping, (tiles,), self.block_tables, max_seq_len)

    def fill(
        self,
        token_ids: Sequence[int],
        query_lens: np.ndarray,
        starts: np.ndarray,
        block_tables: Sequence[list[int]],
        last_rows: Sequence[int],
        shape: StepShape,
    ) -> None:
        """Write a step of n tokens in R requests, pad it to T tokens, and start the copy to the device.

        token_ids            n, the requests' new tokens end to end
        query_lens, starts   (R,) int64, how many each has, and the position of its first
        block_tables         R, each at least as long as the context
        last_rows            at most P
        """
        n, requests = len(token_ids), len(query_lens)
        if shape not in self._host_fields:
            self._host_fields[shape] = [field.numpy() for field in _split(self._host, shape)]
        ids, positions, slots, lasts, tiles, tables = self._host_fields[shape]
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
        padding = shape.tokens - n
        found = query_tiles(np.append(query_lens, padding), np.append(starts, -padding), shape.tile_tokens)
        tiles[:, : found.shape[1]] = found
        tiles[2, found.shape[1] :] = 0
        self._copy(shape, requests, blocks)

    def _copy(self, shape: StepShape, requests: int, blocks: int) -> None:
        words = shape.words + -(-requests * blocks // 2)
        self._device[:words].copy_(self._host[:words], non_blocking=True)
        narrow = self.fields(shape).tables[: requests * blocks].view(requests, blocks)
        self.block_tables[:requests, :blocks].copy_(narrow)


def _split(words: torch.Tensor, shape: StepShape) -> StepFields:
    lengths = [shape.tokens, shape.tokens, shape.tokens, shape.rows, 2 * shape.tiles]
    *fields, tiles, tables = words.split([*lengths, len(words) - sum(lengths)])
    return StepFields(*fields, tiles.view(torch.int32).view(4, shape.tiles), tables.view(torch.int32))


class BlockTables:
    """Which blocks each row of a step has; a row that stays in its place costs nothing until it gets a block.

    rows   (P, W) int32, what was read last. Behind a row's own blocks there may be anything
    """

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self.rows = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._read_from: list[list[int]] = [[] for _ in range(max_rows)]
        self._held = [0] * max_rows  # how many blocks each had

    def read(self, block_tables: Sequence[list[int]]) -> None:
        """Bring `rows` up to date. Lists only grow: a request that lost its blocks comes with another list."""
        for i, (table, length) in enumerate(zip(block_tables, map(len, block_tables))):
            is_known = self._read_from[i] is table
            if is_known and self._held[i] == length:
                continue
            first = self._held[i] if is_known else 0
            self.rows[i, first:length] = table[first:]
            self._read_from[i], self._held[i] = table, length
