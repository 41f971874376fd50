"""KV blocks whose memory adapters may borrow. Beside vllm/v1/core/block_pool.py, not in vLLM."""

from collections.abc import Callable, Iterable, Sequence, Set

from minivllm.core.block_pool import BlockPool
from minivllm.gpu.pages.manager import ElasticModelManager


class ElasticBlockPool(BlockPool):
    """A block pool that lends pages of w blocks to adapters, and takes them back from idle ones when it must.

    Page i is the memory of blocks i * w to (i + 1) * w - 1, as many of them as there are; higher pages are the
    adapters' own. A page is lent when all its blocks are free. Prefixes that were found there are forgotten: adapters
    in demand go before prefixes, and keys and values of running requests before idle adapters.

    least   usable blocks that are never lent, so that the longest request can always run
    spare   says whose adapters do not give way now
    """

    def __init__(
        self,
        num_blocks: int,
        blocks_a_page: int,
        least: int,
        manager: ElasticModelManager,
        spare: Callable[[], Set[int]],
    ) -> None:
        super().__init__(num_blocks)
        self.blocks_a_page, self.least = blocks_a_page, least
        self.manager, self.spare = manager, spare
        self.num_lent = 0

    def blocks_of(self, page: int) -> range:
        first = page * self.blocks_a_page
        return range(first, max(first, min(first + self.blocks_a_page, self.num_blocks)))

    # What adapters ask for.

    def choose(self, pages: Iterable[int], most: int) -> list[int]:
        """The first of these pages whose blocks are all free, as long as enough blocks are left."""
        chosen: list[int] = []
        left = self.num_usable_blocks - self.num_lent - self.least
        for page in pages:
            if len(chosen) >= most:
                break
            blocks = self.blocks_of(page)
            if len(blocks) <= max(left, 0) and all(block in self.free for block in blocks):
                chosen.append(page)
                left -= len(blocks)
        return chosen

    def lend(self, page: int) -> None:
        """Give a page to adapters; what was found in its blocks is forgotten."""
        blocks = self.blocks_of(page)
        for block in blocks:
            del self.free[block]
            if block_hash := self.hash_of.pop(block, None):
                del self.block_of[block_hash]
        self.num_lent += len(blocks)

    def take_back(self, page: int) -> None:
        """Blocks that nothing can be found in are handed out next."""
        blocks = self.blocks_of(page)
        self.num_lent -= len(blocks)
        for block in reversed(blocks):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    # What requests ask for.

    def get_num_free_blocks(self) -> int:
        """Free ones, and those that idle adapters would give back.

        Those of busy adapters are counted, which are few: this is asked for many requests in each step.
        """
        return len(self.free) + (self.num_lent - self._num_lent_to_busy() if self.num_lent else 0)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        while num_blocks > len(self.free):
            if self.manager.give_way(self.spare(), self._lent_to_idle().keys()) is None:
                break
        return super().get_new_blocks(num_blocks)

    def _num_lent_to_busy(self) -> int:
        """Blocks of adapters that would not give way, or are about to come into a slot."""
        ledger, active = self.manager.pool.ledger, self.manager.list_active_adapters()
        slots = [
            active[adapter] for adapter in self.spare() | self.manager.pinned_adapters if adapter in active
        ]
        dealt = [*(ledger.held.get(slot, ()) for slot in slots), *ledger.reserved.values()]
        return self._num_blocks_of([page for pages in dealt for page in pages])

    def _num_blocks_of(self, pages: Sequence[int]) -> int:
        """Of several pages: the last page of KV's may have fewer blocks than others."""
        whole, rest = divmod(self.num_blocks, self.blocks_a_page)
        return sum(page < whole for page in pages) * self.blocks_a_page + rest * pages.count(whole)

    def _lent_to_idle(self) -> dict[int, int]:
        """Slot -> blocks that it has borrowed, of slots that would give way."""
        held = self.manager.pool.ledger.held
        blocks = {slot: self._num_blocks_of(held.get(slot, ())) for slot in self.manager.idle(self.spare())}
        return {slot: count for slot, count in blocks.items() if count}
