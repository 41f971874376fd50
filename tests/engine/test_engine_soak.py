"""300 random requests against an engine whose adapters change under it; `make nightly` does thousands."""

import random
from datetime import date

import pytest
from soak import run_soak
from soak_disk import AdapterDisk, VersionedOracle
from soak_round import NUM_ADAPTERS, Report, Round

from minivllm import SamplingParams
from minivllm.engine.adapter_registry import AdapterRegistry

NIGHTLY_REQUESTS = 10_000


def test_nothing_is_lost_leaked_or_answered_wrongly():
    report = run_soak(300, seed=0)

    assert report.counts["requests"] == 300
    assert report.counts["tokens verified"] > 1000
    # Without these it would have been no soak.
    for happened in (
        *("finished: abort", "finished: error", "finished: stop", "chunks", "mixed steps", "skips"),
        *("preemptions", "prefix hits", "evictions", "cpu evictions", "reloads", "unloads", "pins"),
        *("refused", "nonsense"),
    ):
        assert report.counts[happened] > 3, f"{happened}: {report.counts[happened]}"


@pytest.mark.nightly
def test_nor_in_thousands_of_requests():
    """Others every night: a failure names its round's seed."""
    report = run_soak(NIGHTLY_REQUESTS, seed=1000 * date.today().toordinal())

    assert report.counts["requests"] == NIGHTLY_REQUESTS
    assert report.counts["tokens verified"] > 3 * NIGHTLY_REQUESTS


def test_a_reload_under_an_earlier_request_is_noticed(monkeypatch):
    in_flight = AdapterRegistry._in_flight

    def overlooks_the_latest(self, adapter_id, before=None):
        return in_flight(self, adapter_id, before if before is None else before - 1)

    monkeypatch.setattr(AdapterRegistry, "_in_flight", overlooks_the_latest)

    with pytest.raises(AssertionError, match="reload too early"):
        run_soak(100, seed=104)


def test_a_refused_reload_takes_no_other_order_with_it(tmp_path):
    disk = AdapterDisk(tmp_path, "qwen2-tied", NUM_ADAPTERS)
    soak = Round(disk, VersionedOracle(disk), random.Random(0), Report())
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    soak.send(1, [5, 6, 7], params)
    soak.step()
    soak.add(1, reload=True)  # waits for the request
    disk.spoil(1, "missing")
    soak.send(1, [8, 9], params, reload=True)  # no request came between the two orders: they have one number
    soak.mend()

    while soak.live:
        soak.step()

    assert (soak.report.counts["refused"], soak.report.counts["reloads"]) == (1, 1)
