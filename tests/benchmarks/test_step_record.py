"""A record of a benchmark's steps says what each step computed, whether its tokens were read at once or later."""

from itertools import pairwise

import pytest

from benchmarks.step_record import COLUMNS, StepRecord, as_text
from tests.worlds.ahead import run_ahead
from tests.worlds.engines import greedy
from tests.worlds.models import token_ids


def record_of(engine, world):
    record = StepRecord(engine, dict.fromkeys(range(1, 20), 4))
    for number, (prompt, answer, name) in enumerate([(5, 3, None), (7, 2, "qv"), (4, 4, "mlp")]):
        lora = world.request(name) if name else None
        engine.add_request(str(number), token_ids(prompt, number), greedy(answer), lora_request=lora)
    while engine.has_unfinished_requests():
        record.step()
    record.close()
    return [dict(zip(COLUMNS, line.split())) for line in as_text(record, 0.0)["steps"]]


def test_every_computed_token_stands_in_the_row_of_its_step(world):
    engine = world.engine()

    rows = record_of(engine, world)

    assert (
        sum(int(row["tokens"]) for row in rows)
        == engine.scheduler.num_computed_tokens
        == 5 + 7 + 4 + 2 + 1 + 3
    )
    assert sum(int(row["told"]) for row in rows) == 3 + 2 + 4
    assert rows[0]["adapter_ids"].count(",") == 1 and rows[0]["adapters"] == "2" and rows[0]["ranks"] == "8"
    assert rows[1]["adapter_ids"] == "="
    assert [row["ahead"] for row in rows] == ["0"] * len(rows)
    assert sum(int(row["load"]) for row in rows) == 2


def test_a_step_that_ran_ahead_is_done_when_the_next_call_has_told_its_tokens(world):
    at_once, later = record_of(world.engine(), world), record_of(run_ahead(world.engine()), world)

    assert [row["tokens"] for row in later[:-1]] == [row["tokens"] for row in at_once]
    assert [row["told"] for row in later] == ["0", *(row["told"] for row in at_once)]
    assert [row["ahead"] for row in later] == ["1"] * len(at_once) + ["0"]
    for row, after in pairwise(later):
        ended = float(after["started_s"]) + float(after["ms"]) / 1e3
        assert float(row["done_s"]) == pytest.approx(ended, abs=2e-4)


def test_a_call_that_does_nothing_has_no_row(world):
    record = StepRecord(world.engine(), {})

    assert not record.step()

    assert as_text(record, 0.0)["steps"] == []
