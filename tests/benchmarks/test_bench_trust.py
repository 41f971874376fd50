"""The simulator says what the engine did: fitted to one committed record, judged by another one at another rate."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.fit import fit
from benchmarks.fit_reads import fit_reads, reads_of
from benchmarks.report import RESULTS
from benchmarks.trust import JUDGED, compare, measured_in, simulate, spread
from minivllm.simulate.cost_model import StepWork
from minivllm.simulate.replay import replay

SLOW, FAST = (RESULTS / f"trust-cpu-{rate}-2026-11-22.json" for rate in ("1.0", "1.5"))


def seldom(*values):
    """One of several alike."""
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("fitted", "judged"), [(SLOW, FAST), (FAST, SLOW)], ids=["slow-fast", "fast-slow"])
def test_speed_and_waits_at_another_rate_are_foretold(fitted, judged):
    found = {name: simulated / measured for name, (measured, simulated) in compare([fitted], judged).items()}

    assert found["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert found["ttft_p50_ms"] == pytest.approx(1, abs=0.10)
    assert found["ttft_p99_ms"] == pytest.approx(1, abs=0.20)


def on_h100(*names, day="2026-11-22"):
    return [RESULTS / f"engine-serve-{name}-h100-{day}.json" for name in names]


TODAY = "2026-11-23"
# base: the base model; elastic: 32 adapters in pages; slots8: 32 in eight slots; many: 2,000 that are read from disk;
# many-base: the base model of that engine. Then the requests a second.
PAGES, SLOTS = ("base-16", "elastic-16", "many-16"), ("base-16", "slots8-16")


@pytest.mark.parametrize("judged", [seldom("many-base-16"), seldom("base-32"), "many-base-32", "elastic-32"])
def test_other_runs_on_the_h100_are_foretold(judged):
    assert_foretold(foretold_of_pages(judged))


# The first two are runs by the very same decisions: see below.
@pytest.mark.nightly
@pytest.mark.parametrize("judged", ["slots8-32", "slots8-lfu-32", "slots8-affine-32"])
def test_an_h100_with_eight_slots_is_foretold_where_steps_scatter_as_they_do_there(judged):
    """Half of the requests wait for a slot: a step that is one percent longer moves the median by a tenth."""
    (path,) = on_h100(judged)
    measured = measured_in(json.loads(path.read_text()), "lora")

    found = spread(on_h100(*SLOTS), path, times=12)

    assert_foretold({name: (measured[name], middle) for name, (_, middle, _) in found.items()})


# Of an engine whose requests wait for slots for 64 steps at most.
@pytest.mark.nightly
@pytest.mark.parametrize("judged", [seldom("wait64-base-32"), "wait64-elastic-32", "wait64-slots8-32"])
@pytest.mark.parametrize("slots", [(), ("wait64-slots8-16",)], ids=["pages", "pages-and-slots"])
def test_an_h100_at_twice_the_rate_and_with_other_slots_is_foretold(slots, judged):
    fitted = on_h100("wait64-base-16", "wait64-elastic-16", *slots)

    assert_foretold(compare(fitted, *on_h100(judged)))


@pytest.mark.nightly
def test_eight_slots_are_foretold_from_traffic_in_pages_and_decoding_in_slots():
    decode = RESULTS / "engine-decode-ahead-h100-2026-11-22.json"

    assert_foretold(
        compare([*on_h100("wait64-base-16", "wait64-elastic-16"), decode], *on_h100("wait64-slots8-16"))
    )


@pytest.mark.parametrize("judged", [seldom("many-16"), "many-32"])
def test_reads_of_two_thousand_adapters_leave_as_much_throughput(judged):
    """One simulation misses the median waits, which half a millisecond moves."""
    measured, simulated = foretold_of_pages(judged)["tokens_per_second"]
    assert simulated / measured == pytest.approx(1, abs=0.05)


def test_what_the_engine_did_beside_reads_is_no_part_of_them():
    (path,) = on_h100("many-16", day=TODAY)
    traffic = reads_of(result := json.loads(path.read_text()), measured_in(result, "lora"))

    alone = fit_reads(traffic, replace(cost_in_pages(), check_s=0.0, take_in_s=0.0, during_reads_s=0.0))
    beside = fit_reads(traffic, cost_in_pages())

    assert len(beside.shares) == 59 and np.mean(beside.shares) == pytest.approx(1, abs=0.01)
    assert beside.model["unpack_s"] < alone.model["unpack_s"]


@cache
def cost_in_pages():
    return fit(on_h100(*PAGES, day=TODAY))


def foretold_of_pages(judged):
    """As `compare`, fitted once for all tests."""
    (path,) = on_h100(judged, day=TODAY)
    result = json.loads(path.read_text())
    simulated, measured = simulate(result, cost_in_pages(), "lora"), measured_in(result, "lora")
    return {name: (measured[name], simulated[name]) for name in JUDGED}


def assert_foretold(found):
    shares = {name: simulated / measured for name, (measured, simulated) in found.items()}
    assert shares["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert shares["ttft_p50_ms"] == pytest.approx(1, abs=0.10)
    assert shares["ttft_p99_ms"] == pytest.approx(1, abs=0.20)


@pytest.mark.parametrize(
    ("name", "calls"),
    [seldom("base-32", 1863), ("elastic-32", 1554), seldom("many-16", 1772), ("many-32", 1243)],
)
def test_the_simulated_engine_decides_as_that_of_today_did(name, calls):
    """Given the times of its calls, and which of 2,000 adapters had been read by then: in every one."""
    (path,) = on_h100(name, day=TODAY)
    row = measured_in(result := json.loads(path.read_text()), "lora")

    replayed, replica = replay(result, row)

    assert len(replayed) == calls and differing(replayed) == 0
    assert replica.reader.num_reads == row["loads"] and replica.counters.reads == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "calls", "most"),
    [
        seldom("base-32", 1841, 0),
        ("elastic-16", 3080, 117),
        seldom("elastic-32", 1520, 0),
        seldom("slots8-16", 2957, 0),
        ("slots8-32", 2001, 0),
        seldom("slots8-lfu-32", 2012, 0),
        ("slots8-affine-32", 1983, 0),
        ("many-16", 1755, 0),
    ],
)
def test_the_simulated_engine_decides_as_the_one_on_the_h100_did(name, calls, most):
    """Given the times of its calls, and which adapters had been read by then.

    Where two requests came at the time of a call, to a tenth of a millisecond, one may come a call early or late.
    """
    (path,) = on_h100(name)
    result = json.loads(path.read_text())
    row = measured_in(result, "lora")

    replayed, replica = replay(result, row)

    assert len(row["steps"]) == calls and differing(replayed) <= most
    assert replica.reader.num_reads + replica.counters.reads == row["loads"]


def differing(replayed):
    """Calls in which the simulated engine launched another step than the real one."""
    return sum(
        one.work != one.call.work
        and (one.work or StepWork()) != pytest.approx(one.call.work or StepWork(), rel=1e-5)
        for one in replayed
    )


POLICIES = ["lru-fcfs", "lfu-fcfs", "gdsf-fcfs", "lru-adapter-affine"]


@pytest.mark.parametrize("name", POLICIES)
def test_what_the_engine_reads_and_copies_under_a_policy_is_foretold(name):
    """Forty adapters of the demo model, eight slots, memory for sixteen; fitted to the run under the defaults."""
    fitted, judged = (RESULTS / f"engine-serve-{each}-cpu-2026-11-22.json" for each in (POLICIES[0], name))
    result = json.loads(judged.read_text())

    found, row = simulate(result, fit([fitted]), "lora"), measured_in(result, "lora")

    assert found["reads"] == pytest.approx(row["loads"], rel=0.10)
    assert found["copies"] == pytest.approx(row["activations"], rel=0.15)
