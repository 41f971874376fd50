"""The scheduler of an engine whose adapters lie in pages. Beside vllm/v1/core/sched/scheduler.py (v0.22.1)."""

from typing import Any

from minivllm.core.scheduler import Scheduler
from minivllm.gpu.pages.admission import ElasticAdmission
from minivllm.gpu.pages.block_pool import ElasticBlockPool
from minivllm.gpu.pages.manager import ElasticModelManager


def scheduler_for_pages(
    manager: ElasticModelManager, blocks_a_page: int, *arguments: Any, **options: Any
) -> Scheduler:
    """The scheduler of an engine, or of a simulated one, whose adapters lie in pages.

    It is the plain one where `blocks_a_page` is 0, because no layer's adapters lie in pages then.

    arguments, options   of `Scheduler`
    """
    if not blocks_a_page:
        return Scheduler(*arguments, **options)
    return ElasticScheduler(*arguments, manager=manager, blocks_a_page=blocks_a_page, **options)


class ElasticScheduler(Scheduler):
    """A `Scheduler` whose KV blocks and adapters share memory.

    manager         of the adapters, its pool bound to the KV cache's memory
    blocks_a_page   w
    """

    def __init__(self, *args: Any, manager: ElasticModelManager, blocks_a_page: int, **options: Any) -> None:
        self.manager, self.blocks_a_page = manager, blocks_a_page
        super().__init__(*args, **options)

    def clear(self) -> None:
        """No request has blocks any more; adapters keep their pages."""
        super().clear()
        wait = self.scheduler_config.max_lora_wait_steps
        self.lora = ElasticAdmission(self.max_loras, wait, self.waiting, self.manager)
        blocks = self.kv_cache.block_pool.num_blocks
        longest = -(-(self.max_model_len or 0) // self.kv_cache.block_size)
        pool = ElasticBlockPool(
            blocks, self.blocks_a_page, min(blocks - 1, longest), self.manager, lambda: self.lora.spared
        )
        ledger = self.manager.pool.ledger
        ledger.lender = pool
        for page in [page for pages in (*ledger.held.values(), *ledger.reserved.values()) for page in pages]:
            pool.lend(page)
        self.kv_cache.block_pool = pool
