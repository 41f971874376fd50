"""The simulator says what the engine did: fitted to one committed record, judged by another one at another rate."""

import pytest

from benchmarks.report import RESULTS
from benchmarks.trust import compare

SLOW, FAST = (RESULTS / f"trust-cpu-{rate}-2026-11-22.json" for rate in ("1.0", "1.5"))


@pytest.mark.parametrize(("fitted", "judged"), [(SLOW, FAST), (FAST, SLOW)], ids=["slow-fast", "fast-slow"])
def test_speed_and_waits_at_another_rate_are_foretold(fitted, judged):
    found = {name: simulated / measured for name, (measured, simulated) in compare([fitted], judged).items()}

    assert found["tokens_per_second"] == pytest.approx(1, abs=0.05)
    assert found["ttft_p50_ms"] == pytest.approx(1, abs=0.10)
    assert found["ttft_p99_ms"] == pytest.approx(1, abs=0.20)
