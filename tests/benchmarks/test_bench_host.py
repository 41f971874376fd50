"""What a step costs the host, measured beside a GPU that is not there."""

import pytest

from benchmarks import host


@pytest.mark.parametrize("case", host.CASES)
def test_every_step_that_is_measured_decodes_with_every_row_and_is_a_step_ahead(case, tmp_path):
    model = host.write_model(tmp_path / "model")
    adapters = host.write_adapters(tmp_path, model, 2, host.RANK)
    engine = host.engine_beside_nothing(model, 6, 2)
    traffic = getattr(host.Traffic(engine, 6, adapters), case)()

    for _ in range(12):
        next(traffic)
        engine.step()

    rows = [sorted(row.kind for row in record.rows) for record in engine.trace.records[-3:]]
    assert rows == [["decode"] * 6 if case == "decode" else ["decode"] * 5 + ["prefill"]] * 3
    assert {row.adapter for row in engine.trace.records[-1].rows} == {"adapter-1", "adapter-2"}
    assert engine.core.unread is not None
