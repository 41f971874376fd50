"""The simulator says what the engine did: fitted to one committed record, judged by another one at another rate."""

import json
from collections import deque

import pytest

from benchmarks.report import RESULTS
from benchmarks.trust import compare, measured_in, simulate, spread
from minivllm.simulate.cost_model import CostModel, StepWork, work_of
from minivllm.simulate.fit import fit
from minivllm.simulate.records import arrivals_of, calls_of, put_in_place, replica_config, sizes_of
from minivllm.simulate.replica import Replica

SLOW, FAST = (RESULTS / f"trust-cpu-{rate}-2026-11-22.json" for rate in ("1.0", "1.5"))


@pytest.mark.parametrize(("fitted", "judged"), [(SLOW, FAST), (FAST, SLOW)], ids=["slow-fast", "fast-slow"])
def test_speed_and_waits_at_another_rate_are_foretold(fitted, judged):
    found = {name: simulated / measured for name, (measured, simulated) in compare([fitted], judged).items()}

    assert found["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert found["ttft_p50_ms"] == pytest.approx(1, abs=0.10)
    assert found["ttft_p99_ms"] == pytest.approx(1, abs=0.20)


def on_h100(*names):
    return [RESULTS / f"engine-serve-{name}-h100-2026-11-22.json" for name in names]


# The base model, 32 adapters in pages, and 32 adapters in eight slots; requests a second.
@pytest.mark.parametrize("judged", ["base-32", "elastic-32", "slots8-32"])
@pytest.mark.parametrize("fitted", [("base-16", "elastic-16"), ("base-16", "elastic-16", "slots8-16")])
def test_an_h100_at_twice_the_rate_and_with_other_slots_is_foretold(fitted, judged):
    found = compare(on_h100(*fitted), *on_h100(judged))

    shares = {name: simulated / measured for name, (measured, simulated) in found.items()}
    assert shares["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert shares["ttft_p50_ms"] == pytest.approx(1, abs=0.10)
    assert shares["ttft_p99_ms"] == pytest.approx(1, abs=0.20)


def test_eight_slots_are_foretold_from_traffic_in_pages_and_decoding_in_slots():
    decode = RESULTS / "engine-decode-ahead-h100-2026-11-22.json"

    found = compare([*on_h100("base-16", "elastic-16"), decode], *on_h100("slots8-16"))

    shares = {name: simulated / measured for name, (measured, simulated) in found.items()}
    assert shares["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert shares["ttft_p50_ms"] == pytest.approx(1, abs=0.10)
    assert shares["ttft_p99_ms"] == pytest.approx(1, abs=0.20)


def test_half_a_millisecond_decides_the_tail_of_a_short_run():
    """Its 99th percentile is the fourth-longest wait: whether two prompts met in one step too large for a graph."""
    fitted = on_h100("base-16", "elastic-16", "100-32")

    measured, simulated = compare(fitted, *on_h100("100-32"))["ttft_p99_ms"]
    least, most = spread(fitted, *on_h100("100-32"), times=12)["ttft_p99_ms"]

    assert least < simulated < 1.1 * most and most > 1.3 * least
    assert least < measured < 1.2 * most


def test_eight_slots_are_foretold_but_for_the_median_wait_by_what_no_slot_was_in():
    """Half of the requests find a slot at once, and half wait: the median needs what slots' kernels take."""
    found = compare(on_h100("base-16", "elastic-16"), *on_h100("slots8-16"))

    shares = {name: simulated / measured for name, (measured, simulated) in found.items()}
    assert shares["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert shares["ttft_p99_ms"] == pytest.approx(1, abs=0.20)


def test_reading_two_thousand_adapters_leaves_as_much_throughput_as_on_the_h100():
    found = compare(on_h100("base-16", "elastic-16"), *on_h100("2000-16"))

    measured, simulated = found["tokens_per_second"]
    assert simulated / measured == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("name", "calls", "most"),
    [
        ("slots8-16", 2920, 0),
        ("slots8-32", 1972, 0),
        ("elastic-32", 1515, 90),
        ("2000-32", 1549, 0),
        ("2000-16", 1495, 158),
    ],
)
def test_the_simulated_engine_decides_as_the_one_on_the_h100_did(name, calls, most):
    """Given the times of its calls, and which adapters had been read by then.

    Those of arrivals were rounded: now and then one comes a call early or late.
    """
    (path,) = on_h100(name)
    result = json.loads(path.read_text())
    row = measured_in(result, "lora")
    cost = CostModel(graph_tokens=1024, unpack_s=1e9)
    replica = Replica(0, replica_config(result, row), cost, sizes_of(row, 1.0))
    put_in_place(replica, row)

    coming, differ = deque(arrivals_of(row)), 0
    for call, ran in zip(calls_of(row), adapters_of_calls(row)):
        while coming and coming[0].time_s <= call.started_s + 5e-5:
            replica.add(coming.popleft())
        for adapter_id in ran & replica.reader.reads.keys():
            replica.reader.reads[adapter_id] = call.started_s
        begun = replica.begin_step(call.started_s) is not None
        work = work_of(replica.output, replica.ranks) if begun and replica.output.scheduled else None
        differ += (work or StepWork()) != pytest.approx(call.work or StepWork(), rel=1e-5)
        if begun:
            replica.end_step(call.ended_s)

    assert not coming and len(row["steps"]) == calls and differ <= most
    assert replica.reader.num_reads + replica.counters.reads == row["loads"]


POLICIES = ["lru-fcfs", "lfu-fcfs", "gdsf-fcfs", "lru-adapter-affine"]


@pytest.mark.parametrize("name", POLICIES)
def test_what_the_engine_reads_and_copies_under_a_policy_is_foretold(name):
    """Forty adapters of the demo model, eight slots, memory for sixteen; fitted to the run under the defaults."""
    fitted, judged = (RESULTS / f"engine-serve-{each}-cpu-2026-11-22.json" for each in (POLICIES[0], name))
    result = json.loads(judged.read_text())

    found, row = simulate(result, fit([fitted]), "lora"), measured_in(result, "lora")

    assert found["reads"] == pytest.approx(row["loads"], rel=0.10)
    assert found["copies"] == pytest.approx(row["activations"], rel=0.15)


def adapters_of_calls(row):
    """Of each call those that its step computed for."""
    place, found = row["step_columns"].index("adapter_ids"), []
    for said in (line.split()[place] for line in row["steps"]):
        found.append(found[-1] if said == "=" else {int(each) for each in said.split(",") if each != "-"})
    return found
