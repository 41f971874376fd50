"""The evicting manager in any order of events, against two plain lists (`tests.worlds.tier_history`)."""

import random

import pytest

from tests.oracles.tiers import TwoTiers
from tests.worlds.managers import make_manager
from tests.worlds.tier_history import History, run

pytestmark = [
    pytest.mark.lab("5.2"),
    pytest.mark.lab("5.3"),
    pytest.mark.lab("5.4"),
    pytest.mark.lab("5.5"),
    pytest.mark.lab("5.6"),
]


@pytest.mark.parametrize(("slots", "memory"), [(1, 1), (2, 2), (2, 4), (3, 5)])
def test_any_history_does_what_two_lists_do(slots, memory, monkeypatch):
    names = ["add"] * 4 + ["activate"] * 4 + ["deactivate", "remove", "touch", "remove_oldest"]
    names += ["pin", "unpin", "unpin", "replace", "in_use"]
    for seed in range(8):
        manager, model = make_manager(slots, memory), TwoTiers(slots, memory)

        run(History(manager, model, random.Random(seed), monkeypatch), names, steps=70)
