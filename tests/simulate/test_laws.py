"""Laws that hold whatever is simulated: queueing theory, and the same again for the same seed."""

import json

import numpy as np
import pytest
from small import config, fleet, traffic

from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.report import report
from minivllm.simulate.traffic import Arrival


@pytest.mark.parametrize(
    ("load", "count"), [(0.5, 40_000), pytest.param(0.8, 150_000, marks=pytest.mark.nightly)]
)
def test_one_at_a_time_waits_as_long_as_pollaczek_and_khinchine_say(load, count):
    rng = np.random.default_rng(11)
    cost = CostModel({"steps": 0.01})  # so a service is 0.01 s for each token of the answer
    lengths = rng.choice([1, 2, 4, 9], count, p=[0.4, 0.3, 0.2, 0.1])
    services = 0.01 * lengths
    rate = load / services.mean()
    times = rng.exponential(1 / rate, count).cumsum()
    made = fleet(config(max_num_seqs=1, blocks=50), cost, ranks=())

    made.serve(Arrival(t, 1, n, None) for t, n in zip(times.tolist(), lengths.tolist()))

    waits = [one.last_s - one.arrival.time_s - 0.01 * one.arrival.output_tokens for one in made.requests]
    expected = rate * (services**2).mean() / (2 * (1 - rate * services.mean()))
    assert np.mean(waits) == pytest.approx(expected, rel=0.03)


def test_a_report_is_the_same_to_the_byte():
    texts = []
    for _ in range(2):
        made = fleet(replicas=2)
        made.serve(traffic())
        texts.append(json.dumps(report(made)))

    assert texts[0] == texts[1]
