"""Blocks for the tokens of requests. Stands for vllm/v1/core/kv_cache_manager.py (v0.22.1)."""

from collections.abc import Sequence

from minivllm.core.prefix_cache import PrefixCache
from minivllm.core.request import Request


class KVCacheManager(PrefixCache):
    """Gives requests blocks for their tokens, and finds blocks computed before. vLLM: `KVCacheManager`."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[int] = ()
    ) -> bool:
        """Make room for the next `num_new_tokens` tokens; False, and nothing changed, if there is none.

        computed_blocks     for a request that has no blocks yet: what `get_computed_blocks` found
        """
        end, held = request.num_computed_tokens + num_new_tokens, len(request.block_ids)
        if not computed_blocks and end <= held * self.block_size:
            return True  # Its last block has room, as in most steps.
        # What was found adds as many blocks to those held as to those needed.
        num_new_blocks = max(0, self.num_blocks_for(end) - held)
        if num_new_blocks > self._num_free_besides(computed_blocks):
            return False
        self.block_pool.touch(computed_blocks)
        request.block_ids += [*computed_blocks, *self.block_pool.get_new_blocks(num_new_blocks)]
        return True

    def can_hold(self, request: Request, computed_blocks: Sequence[int]) -> bool:
        """Whether all tokens a newcomer has by now would fit. vLLM: `full_sequence_must_fit`.

        A prompt admitted for its first chunk alone would soon take blocks from those already running.
        """
        missing = self.num_blocks_for(request.num_tokens) - len(computed_blocks)
        return missing <= self._num_free_besides(computed_blocks)

    def free(self, request: Request) -> None:
        """Give all blocks back, the last first: a prefix is worth more than what follows it."""
        self.block_pool.free_blocks(reversed(request.block_ids))
        request.block_ids = []

    def _num_free_besides(self, block_ids: Sequence[int]) -> int:
        """Free blocks, less those of `block_ids`, which may be free themselves."""
        return self.block_pool.get_num_free_blocks() - sum(b in self.block_pool.free for b in block_ids)
