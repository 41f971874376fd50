"""KV blocks that adapters may borrow, against a model: any history of requests, prefixes and adapters."""

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.request_queue import WaitingQueue
from minivllm.gpu.pages.admission import ElasticAdmission
from minivllm.gpu.pages.block_pool import ElasticBlockPool
from minivllm.gpu.pages.ledger import PageLedger
from minivllm.gpu.pages.scheduler import ElasticScheduler
from minivllm.simulate.adapters import RecordedWorker
from minivllm.simulate.replica import lora_request

BLOCKS, A_PAGE, LEAST = 26, 4, 6
PAGES = 9  # of which the last two and a half are the adapters' own


class Adapters:
    """As much of a manager as the pool asks for: slots with pages, of which some may give way.

    An adapter is in the slot of its own number.
    """

    pinned_adapters = frozenset()

    def __init__(self):
        self.pool = self
        self.ledger = PageLedger(PAGES)

    def list_active_adapters(self):
        return {slot: slot for slot in self.ledger.held}

    def idle(self, spare):
        return [slot for slot in self.ledger.held if slot not in spare]

    def give_way(self, spare, of_use):
        slot = next((slot for slot in self.idle(spare) if slot in of_use), None)
        if slot is not None:
            self.ledger.free_slot(slot)
        return slot


ACTIONS = st.one_of(
    st.tuples(st.just("adapter"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("request"), st.integers(1, 12)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("busy"), st.frozensets(st.integers(0, 3))),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_a_block_is_a_requests_or_an_adapters_or_free(actions):
    adapters, busy = Adapters(), [frozenset()]
    pool = ElasticBlockPool(BLOCKS, A_PAGE, LEAST, adapters, lambda: busy[0])
    adapters.ledger.lender = pool
    requests, name = [], 0
    for kind, value, *more in actions:
        if kind == "adapter":
            if adapters.ledger.reserve(1, more[0]):
                adapters.ledger.assign(1, value, more[0])
        elif kind == "request" and value <= pool.get_num_free_blocks():
            blocks = pool.get_new_blocks(value)
            assert len(set(blocks)) == value
            for block in blocks[::2]:
                name += 1
                pool.cache_block(block, str(name).encode())
            requests.append(blocks)
        elif kind == "end" and requests:
            pool.free_blocks(requests.pop(value % len(requests)))
        elif kind == "busy":
            busy[0] = value

        lent = [b for pages in adapters.ledger.held.values() for page in pages for b in pool.blocks_of(page)]
        used = [block for blocks in requests for block in blocks]
        assert sorted([*lent, *used, *pool.free]) == list(range(1, BLOCKS))
        assert pool.num_lent == len(lent) <= pool.num_usable_blocks - LEAST
        of_idle = [page for slot in adapters.idle(busy[0]) for page in adapters.ledger.held.get(slot, ())]
        given_back = sum(len(pool.blocks_of(page)) for page in of_idle)
        assert pool.get_num_free_blocks() == len(pool.free) + given_back
        assert not pool.hash_of.keys() & set(lent)
        assert {block: digest for digest, block in pool.block_of.items()} == pool.hash_of


def test_keys_and_values_get_back_what_idle_adapters_borrowed_and_no_more():
    adapters, busy = Adapters(), {0}
    pool = ElasticBlockPool(BLOCKS, A_PAGE, LEAST, adapters, lambda: busy)
    adapters.ledger.lender = pool
    adapters.ledger.assign(1, slot=0, wanted=4)  # two of its own, and blocks 24 and 25, and 20 to 23
    adapters.ledger.assign(2, slot=1, wanted=2)

    assert pool.num_lent == 14
    assert pool.get_num_free_blocks() == 25 - 14 + 8

    pool.get_new_blocks(19)

    assert adapters.ledger.held.keys() == {0}


def three_pages(ranks):
    """A worker of adapters by their ranks; two pages are one of the largest rank."""
    return RecordedWorker(LoRAConfig(max_lora_rank=16, max_loras=4), SchedulerConfig(), ranks, pages=3)


def in_slots(worker, *adapter_ids):
    for adapter_id in adapter_ids:
        worker.add_adapter(lora_request(adapter_id))
        worker.manager.activate_adapter(adapter_id)
    return worker.manager


def test_who_has_its_pages_keeps_them_when_another_is_refused():
    """Two adapters that are due, and room for one: with both refused, nobody ran any more."""
    manager = three_pages({1: 16, 2: 16}).manager

    assert manager.reserve(1, spare={1})
    assert not manager.reserve(2, spare={1, 2})

    assert manager.reserve(1, spare={1})
    assert len(manager.pool.ledger.reserved[1]) == 2


def admission_with_adapter_1_in_a_slot():
    """Three pages, of which adapter 1 has two; whoever is passed over is due at once."""
    return ElasticAdmission(4, 0, WaitingQueue(), in_slots(three_pages({1: 16, 2: 16}), 1))


def test_whoever_makes_way_makes_it_for_the_adapter_that_is_due():
    admission = admission_with_adapter_1_in_a_slot()
    admission.begin_step(running=[1], pinned=[])

    assert not admission.fits(2)
    assert admission.make_room([2]) == [1]

    assert admission.taken == {2}


def test_an_adapter_whose_request_joins_does_not_give_its_pages_for_that_requests_blocks():
    admission = admission_with_adapter_1_in_a_slot()
    admission.begin_step(running=[], pinned=[])

    assert 1 not in admission.spared
    assert admission.fits(1)

    assert 1 in admission.spared


def test_nobody_gives_way_for_an_adapter_that_would_not_fit_all_the_same():
    """It needs two pages; of the idle adapter it would get one, and the others are in use."""
    manager = in_slots(three_pages({1: 8, 2: 16, 3: 16}), 1, 2)

    assert not manager.reserve(3, spare={2, 3})

    assert manager.list_active_adapters().keys() == {1, 2}


def test_pages_kept_for_an_adapter_are_free_again_when_it_is_removed():
    manager = three_pages({1: 16, 2: 16}).manager
    assert manager.reserve(1, spare={1})

    manager.remove_adapter(1)

    assert manager.reserve(2, spare={2})


def test_a_cleared_scheduler_lends_no_block_of_a_page_that_an_adapter_has():
    manager = in_slots(three_pages({1: 16}), 1)

    scheduler = ElasticScheduler(
        SchedulerConfig(),
        CacheConfig(num_blocks=BLOCKS),
        LoRAConfig(max_lora_rank=16, max_loras=4),
        manager=manager,
        blocks_a_page=A_PAGE,
        max_model_len=LEAST,
    )

    pool, ledger = scheduler.kv_cache.block_pool, manager.pool.ledger
    lent = {block for page in ledger.held[0] for block in pool.blocks_of(page)}
    assert lent and not lent & set(pool.free)
