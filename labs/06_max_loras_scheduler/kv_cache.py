"""KV blocks and prefix cache. Stands for vllm/v1/core/block_pool.py and kv_cache_manager.py (v0.22.1)."""

from __future__ import annotations

from minivllm.labs import Todo
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from minivllm.core.request import Request

# Attention pads block tables with this block, so it belongs to nobody. vLLM: `BlockPool.null_block`.
NULL_BLOCK = 0
BASE_IDENTITY = 0


@dataclass
class PrefixCacheStats:
    """Tokens looked up and tokens found since the start. vLLM: `PrefixCacheStats`."""

    queries: int = 0
    hits: int = 0


class BlockPool:
    """Who owns which block, and which free blocks still hold something worth finding. vLLM: `BlockPool`.

    A block is used by `ref_cnt` requests or it is free. A free block keeps its contents and its hash
    until it is handed out again, oldest first, so that a finished request's prefix can be found.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2, got {num_blocks}: block {NULL_BLOCK} is only padding"
            )
        self.num_blocks = num_blocks
        self.ref_cnt = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

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


# region lab 6.5: whose keys and values these are
def hash_block_tokens(parent: bytes | None, token_ids: Sequence[int], identity: int) -> bytes:
    """The key a block is found by: a blake2b digest of 16 bytes. vLLM: `hash_block_tokens`.

    parent      key of the block before, which stands for all tokens up to it; None for the first block
    token_ids   the block's own, int64
    identity    0 for base, else the number of this *load* of the adapter. vLLM 0.22.1 puts the
                adapter's name here, and serves stale keys and values once other weights come under it.

    Equal arguments give equal keys; any difference gives another key.
    """
    raise Todo("lab 6.5: whose keys and values these are")


# endregion


class KVCacheManager:
    """Gives requests blocks for their tokens and finds blocks computed before. vLLM: `KVCacheManager`.

    adapter_identity    lora_int_id -> a number that is new for each load of the adapter, >= 1, or None
                        when it is not loaded: then nothing can be found yet
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        enable_caching: bool,
        adapter_identity: Callable[[int], int | None],
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.adapter_identity = adapter_identity
        self.block_pool = BlockPool(num_blocks)
        self.prefix_cache_stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.block_pool.get_num_free_blocks() / self.block_pool.num_usable_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_fits(self, request: Request, max_model_len: int | None) -> None:
        """ValueError if the request, with an empty cache all to itself, would still lack blocks."""
        # The last token is sampled but never computed.
        num_tokens = request.max_num_tokens(max_model_len) - 1
        num_blocks = self.num_blocks_for(num_tokens)
        usable = self.block_pool.num_usable_blocks
        if num_blocks > usable:
            raise ValueError(
                f"request '{request.request_id}' may need {num_blocks} KV blocks ({num_tokens} tokens) but "
                f"the cache has {usable}; shorten the prompt, lower max_tokens, or raise num_blocks"
            )

    # region lab 6.5: whose keys and values these are
    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix of a request which has none yet; [] with caching off.

        Never the whole of it: the last token is computed, or there would be no logits to sample from. Blocks
        are found one after the other (`_block_hashes`), up to the first that is not there. Nothing can be
        found for an adapter that is not loaded; else the request is bound (`_bind`) to the present load first.
        """
        raise Todo("lab 6.5: whose keys and values these are")

    def _identity(self, request: Request) -> int | None:
        """Who computes the request's tokens now: base, or which load of its adapter; None if not loaded."""
        raise Todo("lab 6.5: whose keys and values these are")

    # endregion

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[int] = ()
    ) -> bool:
        """Make room for the next `num_new_tokens` tokens; False, and nothing changed, if there is none.

        computed_blocks     for a request that has no blocks yet: what `get_computed_blocks` found
        """
        start = request.num_computed_tokens + len(computed_blocks) * self.block_size
        held = len(request.block_ids) + len(computed_blocks)
        if start + num_new_tokens <= held * self.block_size and not computed_blocks:
            return True
        num_new_blocks = max(0, self.num_blocks_for(start + num_new_tokens) - held)
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

    def record_hits(self, request: Request, num_cached_tokens: int) -> None:
        """Count an admission: how many of the request's tokens were found."""
        self.prefix_cache_stats.queries += request.num_tokens
        self.prefix_cache_stats.hits += num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the blocks that `num_computed_tokens` fill; call it before the count is advanced.

        Once an adapter is loaded anew under a running request, the rest of its blocks belong to no one
        load, and are never found.
        """
        first, last = request.num_computed_tokens // self.block_size, num_computed_tokens // self.block_size
        if first == last and request.num_computed_tokens:
            return  # no block is full yet; whose it is will be asked when one is
        identity = self._identity(request)
        if request.num_computed_tokens == 0:
            self._bind(request, identity)
        if identity != request.cache_identity:
            request.cache_identity = None
        if not self.enable_caching or request.cache_identity is None:
            return
        hashes = self._block_hashes(request, last)
        for i in range(first, last):
            self.block_pool.cache_block(request.block_ids[i], hashes[i])

    def free(self, request: Request) -> None:
        """Give all blocks back, the last first: a prefix is worth more than what follows it."""
        self.block_pool.free_blocks(reversed(request.block_ids))
        request.block_ids = []

    def _num_free_besides(self, block_ids: Sequence[int]) -> int:
        """Free blocks, less those of `block_ids`, which may be free themselves."""
        return self.block_pool.get_num_free_blocks() - sum(b in self.block_pool.free for b in block_ids)

    def _bind(self, request: Request, identity: int | None) -> None:
        """What the request computes from its first token on is known under this identity."""
        if identity != request.cache_identity:
            request.cache_identity = identity
            request.block_hashes = []

    def _block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` full blocks; kept, since tokens only ever follow."""
        hashes = request.block_hashes
        for i in range(len(hashes), num_blocks):
            token_ids = request.all_token_ids[i * self.block_size : (i + 1) * self.block_size]
            hashes.append(
                hash_block_tokens(hashes[-1] if hashes else None, token_ids, request.cache_identity)
            )
        return hashes[:num_blocks]
