"""Who has which page, against a model: any history of slots, reservations and a lender that also wants its memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.gpu.pages.ledger import PageLedger

PAGES = 9


class Lender:
    """Lends what it does not use itself, and knows what it has lent."""

    def __init__(self):
        self.in_use, self.lent = set(), set()

    def choose(self, pages, most):
        return [page for page in pages if page not in self.in_use][: max(most, 0)]

    def lend(self, page):
        assert page not in self.lent | self.in_use
        self.lent.add(page)

    def take_back(self, page):
        self.lent.remove(page)


ACTIONS = st.one_of(
    st.tuples(st.just("assign"), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("reserve"), st.integers(1, 4), st.integers(0, 5)),
    st.tuples(st.just("release"), st.frozensets(st.integers(1, 4))),
    st.tuples(st.just("free"), st.integers(0, 3)),
    st.tuples(st.just("lender"), st.frozensets(st.integers(0, PAGES - 1))),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=30))
def test_every_page_is_one_slots_or_kept_or_the_lenders(actions):
    lender = Lender()
    ledger = PageLedger(PAGES, lender)
    held, kept = {}, {}
    for kind, *arguments in actions:
        free = PAGES - len(lender.in_use) - sum(held.values()) - sum(kept.values())
        if kind == "assign":
            adapter, slot, wanted = arguments
            if wanted > kept.get(adapter, 0) + held.get(slot, 0) + free:
                with pytest.raises(RuntimeError, match=f"adapter {adapter} needs {wanted} pages"):
                    ledger.assign(adapter, slot, wanted)
            else:
                ledger.assign(adapter, slot, wanted)
                held[slot] = wanted
                kept.pop(adapter, None)
        elif kind == "reserve":
            adapter, wanted = arguments
            fits = wanted <= kept.get(adapter, 0) + free
            assert ledger.reserve(adapter, wanted) == fits
            if fits:
                kept[adapter] = max(wanted, kept.get(adapter, 0))
        elif kind == "release":
            (spare,) = arguments
            ledger.release_reserved(spare)
            kept = {adapter: count for adapter, count in kept.items() if adapter in spare}
        elif kind == "free":
            ledger.free_slot(arguments[0])
            held.pop(arguments[0], None)
        else:
            lender.in_use = set(arguments[0]) - lender.lent

        assert {slot: len(pages) for slot, pages in ledger.held.items()} == held
        assert {adapter: len(pages) for adapter, pages in ledger.reserved.items()} == kept
        dealt = [page for pages in (*ledger.held.values(), *ledger.reserved.values()) for page in pages]
        assert sorted(dealt) == sorted(lender.lent)


def test_the_highest_page_goes_first_and_a_slot_keeps_the_order_of_its_ranks():
    ledger = PageLedger(5)

    ledger.assign(1, slot=0, wanted=2)
    ledger.assign(2, slot=1, wanted=1)
    ledger.assign(1, slot=0, wanted=3)

    assert ledger.held == {0: [4, 3, 1], 1: [2]}
