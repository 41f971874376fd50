"""Blocks for the tokens of requests, and which blocks were computed before, for whom.

Stands for vllm/v1/core/kv_cache_manager.py and a part of vllm/v1/core/kv_cache_utils.py (v0.22.1).
"""

from labs.kit.overlay import Todo
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from minivllm.config import CacheConfig
from minivllm.core.block_hashes import BASE_IDENTITY, block_hashes
from minivllm.core.block_pool import BlockPool
from minivllm.core.request import Request


@dataclass
class PrefixCacheStats:
    """Tokens looked up and tokens found since the start. vLLM: `PrefixCacheStats`."""

    queries: int = 0
    hits: int = 0


# region lab 6.5: whose keys and values these are
def hash_block_tokens(parent: bytes | None, token_ids: Sequence[int], identity: int) -> bytes:
    """The key a block is found by: a blake2b digest of 16 bytes. vLLM: `hash_block_tokens`.

    parent      key of the block before, which stands for all tokens up to it; None for the first block
    token_ids   the block's own, int64
    identity    0 for base, else the number of this *load* of the adapter, since its name and id may come back with
                other weights

    Equal arguments give equal keys; any difference gives another key. That a block is the first is a difference, too.
    """
    raise Todo("lab 6.5: whose keys and values these are")


# endregion


class KVCacheManager:
    """Gives requests blocks for their tokens, and finds blocks computed before. vLLM: `KVCacheManager`.

    adapter_identity    lora_int_id -> a number, >= 1, that is new for each load of the adapter. None = it is not
                        loaded, and nothing can be found yet
    """

    def __init__(self, cache_config: CacheConfig, adapter_identity: Callable[[int], int | None]) -> None:
        self.block_size = cache_config.block_size
        self.enable_caching = cache_config.enable_prefix_caching
        self.adapter_identity = adapter_identity
        self.block_pool = BlockPool(cache_config.num_blocks)
        self.prefix_cache_stats = PrefixCacheStats()

    # Blocks.

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

    # Prefixes.

    # region lab 6.5: whose keys and values these are
    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix of a request which has none yet; [] with caching off.

        Never the whole of it: the last token is computed, or there would be no logits to sample from. Blocks
        are found one after the other (`_block_hashes`), up to the first that is not there. The request is bound
        (`_bind`) to the present load of its adapter first. For one that is not loaded (None) `_block_hashes` gives no
        more than the base model computes, which is nothing for most.
        """
        raise Todo("lab 6.5: whose keys and values these are")

    def _identity(self, request: Request) -> int | None:
        """Who computes the request's tokens now: base, or which load of its adapter; None if not loaded."""
        raise Todo("lab 6.5: whose keys and values these are")

    # endregion

    def record_hits(self, request: Request, num_cached_tokens: int) -> None:
        """Count an admission: how many of the request's tokens were found."""
        self.prefix_cache_stats.queries += request.num_tokens
        self.prefix_cache_stats.hits += num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the blocks that `num_computed_tokens` fill; call it before the count is advanced.

        An adapter may be loaded anew under a running request. The rest of the request's blocks then belong to no one
        load, and are never found.
        """
        first, last = request.num_computed_tokens // self.block_size, num_computed_tokens // self.block_size
        is_bound = request.num_computed_tokens > request.adapter_start
        if first == last and is_bound:
            return  # no block is full yet; whose it is will be asked when one is
        identity = self._identity(request)
        if not is_bound:
            self._bind(request, identity)
        if identity != request.cache_identity:
            request.cache_identity = None
        if not self.enable_caching or request.cache_identity is None:
            return
        hashes = self._block_hashes(request, last)
        for i in range(first, last):
            self.block_pool.cache_block(request.block_ids[i], hashes[i])

    def _bind(self, request: Request, identity: int | None) -> None:
        """What the adapter computes of the request, from its first token on, is known under this identity."""
        if identity != request.cache_identity:
            request.cache_identity = identity
            request.block_hashes = []

    def _block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Keys of the first `num_blocks` full blocks, as far as it is known who computes them."""
        return block_hashes(request, num_blocks, self.block_size, hash_block_tokens)
