"""Who owns which KV block. Stands for vllm/v1/core/block_pool.py (v0.22.1)."""

from collections import OrderedDict
from collections.abc import Iterable

# Attention pads block tables with this block, so it belongs to nobody. vLLM: `BlockPool.null_block`.
NULL_BLOCK = 0


class BlockPool:
    """Who owns which block, and which free blocks still hold something worth finding. vLLM: `BlockPool`.

    A block is used by `ref_cnt` requests, or it is free. A free block keeps its contents and its hash until it is
    handed out again, oldest first. So a finished request's prefix can be found.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2, got {num_blocks}: block {NULL_BLOCK} is only padding"
            )
        self.num_blocks = num_blocks
        self.num_usable_blocks = num_blocks - 1
        self.ref_cnt = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out free blocks, the longest unused first; whatever they held is forgotten."""
        if num_blocks > len(self.free):
            raise ValueError(f"{num_blocks} blocks asked for but only {len(self.free)} are free")
        block_ids = [self.free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_cnt[block_id] = 1
            if block_hash := self.hash_of.pop(block_id, None):
                del self.block_of[block_hash]
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more request uses these blocks."""
        for block_id in block_ids:
            self.free.pop(block_id, None)
            self.ref_cnt[block_id] += 1

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """One request fewer uses these blocks; the first given are the first to be handed out again."""
        for block_id in block_ids:
            if self.ref_cnt[block_id] == 0:
                raise ValueError(f"block {block_id} is freed twice")
            self.ref_cnt[block_id] -= 1
            if self.ref_cnt[block_id] == 0:
                self.free[block_id] = None
                # Nobody can find a block without a hash, so it goes before those that may be found.
                self.free.move_to_end(block_id, last=block_id in self.hash_of)

    def cache_block(self, block_id: int, block_hash: bytes) -> None:
        """Let others find a full block. Of blocks with the same contents the first is found."""
        if block_hash not in self.block_of:
            self.block_of[block_hash] = block_id
            self.hash_of[block_id] = block_hash

    def get_cached_block(self, block_hash: bytes) -> int | None:
        return self.block_of.get(block_hash)
