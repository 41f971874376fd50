"""Block tables of a step's rows on the host. Stands for `BlockTable` of vllm/v1/worker/block_table.py (v0.22.1)."""

from collections.abc import Sequence

import numpy as np


class BlockTables:
    """Which blocks each row of a step has; a row that stays in its place costs nothing until it gets a block.

    rows   (B, W) int32, what was read last. Behind a row's own blocks there may be anything
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
