"""A short soak: clients that are slow, hang up or ask nonsense, adapters that come and go, and an end in the middle."""

import pytest
from server_soak import run_soak


@pytest.mark.filterwarnings("ignore:Adapter")
def test_a_server_under_everything_answers_rightly_and_leaves_nothing_behind():
    counts = run_soak(requests=100, seed=3, adapters=5, clients=20, rounds=2)

    assert counts["answers that are PEFT's"] > 40
    assert counts[503] + counts["refused at the end"] > 2
    assert sum(count for what, count in counts.items() if str(what).endswith(": 200")) > 2
    assert counts["hang up"] > 5
