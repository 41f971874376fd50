"""Random sequences of all operations of the engine, briefly; `make nightly` goes on for a quarter of an hour."""

import hypothesis
import pytest
from engine_machine import search

from minivllm.engine.adapter_registry import AdapterRegistry


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_every_answer_is_that_of_an_engine_which_serves_it_alone(seed: int) -> None:
    counts = search(seed, engines=4)
    # Otherwise the sequences may have become so poor that they show nothing.
    assert all(
        counts[name] for name in ("answers", "reloads", "unloads", "pins", "aborts", "refused", "thrown")
    ), counts


def test_a_reload_under_an_earlier_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = AdapterRegistry._in_flight

    def overlooks_the_latest(self, adapter, before=None):
        return in_flight(self, adapter, before if before is None else before - 1)

    monkeypatch.setattr(AdapterRegistry, "_in_flight", overlooks_the_latest)

    with pytest.raises(AssertionError):
        search(0, engines=20, phases=[hypothesis.Phase.generate])
