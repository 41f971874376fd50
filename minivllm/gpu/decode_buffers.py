"""Inputs of a decode step at fixed addresses. Stands for vllm/v1/worker/block_table.py and utils.py (v0.22.1)."""

from collections.abc import Sequence

import numpy as np
import torch

from minivllm.gpu.block_tables import BlockTables
from minivllm.gpu.paged_attention import PagedAttentionMetadata


class DecodeBuffers:
    """What a CUDA graph of a decode step reads, refilled before each replay. vLLM: `InputBuffers`, `BlockTables`.

    Letters: B rows at most, P of them in a graph, W blocks of the longest context. On the device:

        input_ids, positions, slot_mapping  (B,) int64
        seq_lens                            (B,) int32, 0 = padding
        block_tables                        (B, W) int32
        decode_rows                         (B,) int32: 0, 1, 2 .., never refilled

    A fill is written into pageable memory and goes to the device in one copy: the driver stages it before the call
    returns, so the next fill may overwrite it. Block tables travel as narrow as the step's longest context allows,
    and are put into their fixed place by the device.
    """

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device | str) -> None:
        self.max_rows = max_rows
        self.block_size = block_size
        words = 3 * max_rows + -(-max_rows // 2) + -(-max_rows * max_blocks // 2)
        self._host = torch.zeros(words, dtype=torch.int64)
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.slot_mapping, self.seq_lens, self._tables = self._fields(
            self._device
        )
        self.decode_rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._host_fields = [field.numpy() for field in self._fields(self._host)]
        self._host_tables = BlockTables(max_rows, max_blocks)

    def _fields(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of one copy: three (B,) int64, one (B,) int32, and the rest as int32."""
        rows = self.max_rows
        rest = words[3 * rows :].view(torch.int32)
        tables = rest[rows + rows % 2 :]  # so that a copy of whole words ends where they begin
        return words[:rows], words[rows : 2 * rows], words[2 * rows : 3 * rows], rest[:rows], tables

    def attention(self, size: int, max_model_len: int) -> PagedAttentionMetadata:
        """Of the first `size` rows, whose contexts may become as long as that."""
        return PagedAttentionMetadata(
            slot_mapping=self.slot_mapping[:size],
            decode_rows=self.decode_rows[:size],
            block_tables=self.block_tables[:size],
            seq_lens=self.seq_lens[:size],
            max_seq_len=max_model_len,
            prefill=None,
        )

    def fill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[list[int]],
        size: int,
    ) -> None:
        """Write n rows and pad them to `size`, and start the copy to the device.

        token_ids, positions   n each: the token to compute and its place in its context
        block_tables           n, each at least as long as the context, and of W blocks at most
        """
        n = len(token_ids)
        ids, places, slots, lengths, tables = self._host_fields
        for field in (ids, places, slots, lengths):
            field[n:size] = 0
        ids[:n] = token_ids
        places[:n] = positions
        lengths[:n] = places[:n] + 1
        blocks = int(places[:n].max()) // self.block_size + 1
        self._host_tables.read(block_tables)
        rows = self._host_tables.rows
        tables[: size * blocks].reshape(size, blocks)[:n] = rows[:n, :blocks]
        last_blocks = rows[np.arange(n), places[:n] // self.block_size].astype(np.int64)
        slots[:n] = last_blocks * self.block_size + places[:n] % self.block_size
        self._copy(size, blocks)

    def _copy(self, size: int, blocks: int) -> None:
        words = 3 * self.max_rows + -(-self.max_rows // 2) + -(-size * blocks // 2)
        self._device[:words].copy_(self._host[:words], non_blocking=True)
        narrow = self._tables[: size * blocks].view(size, blocks)
        self.block_tables[:size, :blocks].copy_(narrow)
