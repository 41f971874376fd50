"""Nonsense is refused in one sentence; what is extreme and possible is served."""

import math

import numpy as np
import pytest

from minivllm.commands.simulate import load_cost, ranks_of
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.replica_config import Elastic
from minivllm.simulate.report import report
from minivllm.simulate.traffic import Arrival, with_sessions
from tests.tools.nights import by_day
from tests.worlds.fleets import config, fleet

ROOM_FOR_ONE = config(slots=4, memory=6, blocks=9, elastic=Elastic(2, 10))
FEW_PAGES = config(slots=4, memory=6, blocks=9, elastic=Elastic(4, 10))


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        ([Arrival(0, 4, 0, None)], "at least one token of prompt and one of output, got 4 and 0"),
        ([Arrival(0, 0, 3, None)], "at least one token of prompt and one of output, got 0 and 3"),
        ([Arrival(5, 4, 3, None), Arrival(1, 4, 3, None)], "order of their times, from 0 on: 1 came after 5"),
        ([Arrival(math.nan, 4, 3, None)], "order of their times, from 0 on: nan came"),
        ([Arrival(math.inf, 4, 3, None)], "order of their times, from 0 on: inf came"),
        ([Arrival(-1, 4, 3, None)], "order of their times, from 0 on: -1 came"),
        ([Arrival(0, 4, 3, 6)], "there is no adapter 6; there are 6, from 0"),
        ([Arrival(0, 4, 3, -1)], "there is no adapter -1; there are 6, from 0"),
    ],
)
def test_a_trace_with_errors_is_refused_by_name(arrivals, said):
    made = fleet()

    with pytest.raises(ValueError, match=said):
        made.serve(arrivals)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: fleet(replicas=0), "at least one replica, got 0"),
        (lambda: fleet(FEW_PAGES, ranks=(8, 64)), "adapter of rank 64 needs 8 pages, more than all 5"),
        (lambda: report(fleet()), "nothing was served"),
        (lambda: CostModel(read_bytes_per_s=0.0), "read_bytes_per_s must be above 0, got 0"),
        (lambda: with_sessions([], turns=math.inf), "not infinitely many, got inf"),
        (lambda: ranks_of("8,x"), "--ranks '8,x' is not of the form 8,16,64"),
    ],
)
def test_what_cannot_be_simulated_is_said(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()


def test_an_unknown_cost_model_is_told_which_there_are():
    with pytest.raises(FileNotFoundError, match=r"no cost model 'mine'; .* or h100-llama-8b$"):
        load_cost("mine")


@pytest.mark.parametrize(
    ("options", "arrivals"),
    [
        ({}, [Arrival(0.0, 1, 1, None)]),
        ({"replica": config(max_num_seqs=1)}, [Arrival(0.0, 9, 3, n % 6) for n in range(40)]),
        ({"replica": config(slots=1, memory=1, blocks=3)}, [Arrival(0.0, 16, 3, n % 6) for n in range(40)]),
        ({"replica": config(tokens=8)}, [Arrival(n / 1e6, 90, 2, n % 6) for n in range(40)]),
        ({"replicas": 64}, [Arrival(0.0, 9, 3, n % 6) for n in range(5)]),
        ({"replica": FEW_PAGES}, [Arrival(0.0, 100, 20, n % 6) for n in range(12)]),
        ({"replica": ROOM_FOR_ONE}, [Arrival(0.0, 100, 20, n % 6) for n in range(12)]),
    ],
    ids=[
        "one token",
        "one at a time",
        "three blocks",
        "far above capacity",
        "64 for 5",
        "few pages",
        "room for one",
    ],
)
def test_extremes_are_served_to_the_last_token(options, arrivals):
    made = fleet(**options)

    made.serve(arrivals)

    assert sum(r.scheduler.num_sampled_tokens for r in made.replicas) == sum(
        a.output_tokens for a in arrivals
    )
    assert all(math.isfinite(value) and value >= 0 for value in report(made).values())


@pytest.mark.parametrize("seed", by_day(range(40)))
def test_however_few_pages_there_are_everybody_is_served(seed):
    """Keys and values and adapters share them, and there is always room for the longest request."""
    rng = np.random.default_rng(seed)
    replica = config(
        slots=int(rng.integers(1, 6)),
        memory=6,
        max_num_seqs=int(rng.integers(1, 9)),
        tokens=int(rng.choice([1, 7, 16, 256])),
        blocks=int(rng.integers(11, 60)),
        wait=int(rng.integers(1, 20)),
        elastic=Elastic(int(rng.integers(2, 9)), int(rng.integers(1, 21))),
        max_model_len=130,
        concurrent_reads=bool(rng.integers(2)),
    )
    cost = CostModel({"steps": 0.01}, read_s=0.03, launch_s=0.004, graph_tokens=16)
    times = rng.choice([0, 0.01, 0.3], 40).cumsum().tolist()
    arrivals = [
        Arrival(t, int(rng.integers(1, 100)), int(rng.integers(1, 30)), int(rng.integers(6))) for t in times
    ]
    made = fleet(replica, cost, ranks=(4, 8, 16, 16, 8, 4))

    made.serve(arrivals)

    assert made.replicas[0].scheduler.num_sampled_tokens == sum(one.output_tokens for one in arrivals)
