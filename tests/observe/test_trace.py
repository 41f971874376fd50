"""The step trace survives its file, counts what happened, and is drawn so that every adapter can be seen."""

import gc
import json
import tracemalloc
from dataclasses import asdict, replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from minivllm.engine.metrics import EngineMetrics
from minivllm.lora.events import LoRAStats
from minivllm.observe.palette import adapter_colours
from minivllm.observe.reports import SchedulerStats, snapshot
from minivllm.observe.trace import SlotEvent, StepRecord, Trace, TraceRow, TraceSkip
from minivllm.observe.trace_plot import draw_trace
from tests.oracles.recorded import RecordedWorld
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.models import token_ids


def small_trace() -> Trace:
    """Two slots, three adapters and base: every kind of thing happens at least once."""
    return Trace(
        [
            StepRecord(
                0,
                0.0,
                rows=[
                    TraceRow("a", "sql", 0, 30, "chunk"),
                    TraceRow("b", None, None, 9, "prefill", cached=16),
                ],
                slots=["sql", None],
                loads=["sql"],
                activations=[SlotEvent("sql", 0)],
                waiting=["c"],
                running=2,
            ),
            StepRecord(
                1,
                0.02,
                rows=[TraceRow("a", "sql", 0, 5, "chunk"), TraceRow("c", "größe", 1, 12, "prefill")],
                slots=["sql", "größe"],
                pinned=["größe"],
                loads=["größe"],
                activations=[SlotEvent("größe", 1)],
                skipped=[TraceSkip("d", "dates", "max_loras")],
                preempted=["b"],
                waiting=["b", "d"],
                running=2,
            ),
            StepRecord(
                2,
                0.05,
                rows=[TraceRow("d", "dates", 0, 7, "prefill"), TraceRow("b", None, None, 1, "decode")],
                slots=["dates", "größe"],
                pinned=["größe"],
                activations=[SlotEvent("dates", 0)],
                evictions=[SlotEvent("sql", 0)],
                running=2,
            ),
        ]
    )


def test_a_trace_reads_back_as_it_was_written(tmp_path):
    trace = small_trace()

    trace.write_jsonl(tmp_path / "trace.jsonl")

    assert Trace.read_jsonl(tmp_path / "trace.jsonl").records == trace.records


def test_a_file_holds_one_plain_json_object_a_step(tmp_path):
    small_trace().write_jsonl(tmp_path / "trace.jsonl")

    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text("utf-8").splitlines()]

    assert lines == [asdict(record) for record in small_trace().records]
    assert lines[0]["rows"][1] == {
        "request": "b",
        "adapter": None,
        "slot": None,
        "tokens": 9,
        "kind": "prefill",
        "cached": 16,
    }
    assert lines[1]["skipped"] == [{"request": "d", "adapter": "dates", "reason": "max_loras"}]


@pytest.mark.parametrize("line", ['{"step": 1', '{"step": 1}', "[]", '{"step": 1, "time_s": 0.0, "x": 3}'])
def test_a_line_that_is_no_step_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    small_trace().write_jsonl(path)
    path.write_text(path.read_text("utf-8") + line + "\n", "utf-8")

    with pytest.raises(ValueError, match=r"line 4 of '.*trace\.jsonl'"):
        Trace.read_jsonl(path)


def test_a_trace_with_a_capacity_keeps_the_last_steps():
    trace = Trace(capacity=3)

    for step in range(10):
        trace.append(StepRecord(step, step / 10))

    assert [record.step for record in trace.records] == [7, 8, 9]


def busy_record(step: int) -> StepRecord:
    """Of a server with long ids, none of which is in two steps."""
    rows = [TraceRow(f"request-{step}-{i:0100}", "sql", 0, 1, "chunk") for i in range(8)]
    waiting = [f"waiting-{step}-{i:0100}" for i in range(16)]
    skipped = [TraceSkip(name, "dates", "max_loras") for name in waiting]
    return StepRecord(
        step, 0.0, rows, ["sql"], skipped=skipped, waiting=waiting, more_waiting=9000, more_skipped=80
    )


def test_a_trace_with_a_limit_on_its_bytes_keeps_the_last_steps_that_fit():
    trace = Trace(max_bytes=100_000)

    for step in range(300):
        trace.append(busy_record(step))

    assert 80_000 < trace.num_bytes <= 100_000
    assert [record.step for record in trace.records] == list(range(300 - len(trace), 300))
    assert trace.summary()["steps_left_out"] == 300 - len(trace) > 200


def test_a_step_larger_than_the_limit_is_kept_until_the_next():
    trace = Trace(max_bytes=10)

    for step in range(3):
        trace.append(busy_record(step))

    assert [record.step for record in trace.records] == [2]


def test_a_trace_takes_no_more_memory_than_it_says():
    """Also where rows are shared between steps, as those of decodes are."""
    trace = Trace(max_bytes=400_000)
    shared = [TraceRow(f"request-{i}", "sql", 0, 1, "decode") for i in range(20)]
    gc.collect()
    tracemalloc.start()

    for step in range(1000):
        record = busy_record(step)
        trace.append(replace(record, rows=record.rows + shared))
    del record
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert 0.5 * trace.num_bytes < taken <= 1.05 * trace.num_bytes


def test_a_trace_says_what_it_leaves_out():
    trace = Trace([busy_record(7), busy_record(8)])

    summary = trace.summary()

    assert summary["skips"] == 2 * (16 + 80)
    assert summary["names_left_out"] == 2 * (9000 + 80)
    assert summary["steps_left_out"] == 7
    assert (trace.records[0].num_waiting, trace.records[0].num_skipped) == (9016, 96)


def test_a_trace_written_before_names_were_left_out_still_reads(tmp_path):
    lines = [asdict(record) for record in small_trace().records]
    for line in lines:
        del line["more_waiting"], line["more_skipped"]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert Trace.read_jsonl(tmp_path / "old.jsonl").records == small_trace().records


def test_the_picture_of_a_long_queue_shows_how_long_it_was(tmp_path):
    """As many wait as are named, or five hundred times as many: the line of those who run stands at another height."""
    named = [replace(busy_record(step), more_waiting=0, more_skipped=0, running=400) for step in range(4)]

    draw_trace(Trace(named), tmp_path / "short.png")
    draw_trace(Trace([replace(record, more_waiting=9000) for record in named]), tmp_path / "long.png")

    short, long = imread(tmp_path / "short.png"), imread(tmp_path / "long.png")
    assert share_of(long, "#D9D9D9") > share_of(short, "#D9D9D9") + 0.01


def test_the_summary_counts_what_happened():
    assert small_trace().summary() == {
        "steps": 3,
        "requests": 4,
        "adapters": 3,
        "tokens": 64,
        "prefills": 3,
        "chunks": 2,
        "decodes": 1,
        "prefix_hits": 1,
        "mixed_steps": 3,
        "loads": 2,
        "activations": 3,
        "evictions": 1,
        "skips": 1,
        "preemptions": 1,
        "steps_left_out": 0,
        "names_left_out": 0,
    }


def share_of(picture: np.ndarray, colour: str, alpha: float = 1.0) -> float:
    """Which part of the picture has this colour, laid over a light background with this opacity."""
    background = 1.0 if alpha == 1.0 else 0xF4 / 255
    wanted = alpha * np.array(to_rgb(colour)) + (1 - alpha) * background
    return float((np.abs(picture[..., :3] - wanted).max(axis=-1) < 2.5 / 255).mean())


def test_the_picture_shows_every_adapter_in_its_colour(tmp_path):
    trace = small_trace()

    draw_trace(trace, tmp_path / "slots.png")

    picture = imread(tmp_path / "slots.png")
    height, width, _ = picture.shape
    assert 1000 < width < 2000
    assert 400 < height < 2000
    colours = adapter_colours(trace.adapters)
    assert set(colours) == {None, "sql", "größe", "dates"}
    for colour in colours.values():
        assert share_of(picture, colour) > 0.01


def test_an_adapter_that_only_sits_in_its_slot_is_pale(tmp_path):
    draw_trace(small_trace(), tmp_path / "idle.png")
    draw_trace(Trace(small_trace().records[:2]), tmp_path / "busy.png")

    colour = adapter_colours(small_trace().adapters)["größe"]

    assert share_of(imread(tmp_path / "idle.png"), colour, alpha=0.35) > 0.01
    assert share_of(imread(tmp_path / "busy.png"), colour, alpha=0.35) < 0.001


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no step"):
        draw_trace(Trace(), tmp_path / "none.png")


def test_a_snapshot_gathers_the_counters_of_engine_scheduler_and_adapters():
    scheduler = SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_free_blocks=7,
        num_cached_blocks=3,
        kv_cache_usage=0.25,
        prefix_cache_queries=40,
        prefix_cache_hits=16,
        num_preemptions=1,
        num_computed_tokens=90,
        num_sampled_tokens=30,
    )
    metrics = EngineMetrics()
    metrics.observe_step(step_seconds=0.5, forward_seconds=0.4)
    metrics.observe_step(step_seconds=0.25, forward_seconds=0.2)
    metrics.observe_finished("stop")
    metrics.observe_finished("stop")
    metrics.observe_finished("error")

    found = json.loads(json.dumps(snapshot(metrics, scheduler, LoRAStats(hits=3, misses=1))))

    assert found["steps"] == 2
    assert found["step_seconds"] == pytest.approx(0.75)
    assert found["forward_seconds"] == pytest.approx(0.6)
    assert found["tokens_per_second"] == pytest.approx(40)
    assert found["finished"] == {"stop": 2, "error": 1}
    assert found["scheduler"]["prefix_cache_hits"] == 16
    assert found["lora"]["hit_rate"] == 0.75


class TestRecordOfAStep:
    @pytest.fixture
    def world(self):
        return RecordedWorld()

    def test_calls_parts_of_a_prompt_chunks_and_single_tokens_decodes(self, world):
        engine = world.engine(max_num_batched_tokens=4)
        engine.add_request("a", token_ids(9, 1), greedy(3))

        run(engine)

        assert [(row.tokens, row.kind) for r in engine.trace.records for row in r.rows] == [
            (4, "chunk"),
            (4, "chunk"),
            (1, "chunk"),
            (1, "decode"),
            (1, "decode"),
        ]

    def test_names_the_rows_their_slots_and_what_the_step_loaded(self, world):
        engine = world.engine(max_loras=2)
        engine.add_request("q", [5, 6, 7], greedy(4), lora_request=world.request("qv"))
        engine.add_request("base", [5, 6], greedy(4))
        engine.add_request("m", [5, 6, 7, 8], greedy(4), lora_request=world.request("mlp"))

        engine.step()

        [record] = engine.trace.records
        assert [(row.request, row.adapter, row.slot, row.tokens, row.kind) for row in record.rows] == [
            ("base", None, None, 2, "prefill"),
            ("q", "qv", 0, 3, "prefill"),
            ("m", "mlp", 1, 4, "prefill"),
        ]
        assert record.slots == ["qv", "mlp"]
        assert record.loads == ["qv", "mlp"]
        assert record.activations == [SlotEvent("qv", 0), SlotEvent("mlp", 1)]
        assert (record.running, record.waiting, record.skipped, record.evictions) == (3, [], [], [])

    def test_tells_who_was_skipped_and_who_was_evicted(self, world):
        engine = world.engine(max_loras=1)
        engine.add_request("first", [5, 6, 7], greedy(1), lora_request=world.request("qv"))
        engine.add_request("second", [5, 6, 7], greedy(1), lora_request=world.request("all"))

        run(engine)

        first, second = engine.trace.records
        assert first.skipped == [TraceSkip("second", "all", "max_loras")]
        assert first.waiting == ["second"]
        assert second.evictions == [SlotEvent("qv", 0)]
        assert second.slots == ["all"]

    def test_tells_hits_when_a_request_is_admitted(self, world):
        engine = world.engine()
        for name in ("a", "b"):
            engine.add_request(name, token_ids(9, 1), greedy(2), lora_request=world.request("qv"))
            run(engine)

        rows = [row for record in engine.trace.records for row in record.rows]
        assert [(row.request, row.tokens, row.cached, row.kind) for row in rows] == [
            ("a", 9, 0, "prefill"),
            ("a", 1, 0, "decode"),
            ("b", 1, 8, "prefill"),
            ("b", 1, 0, "decode"),
        ]

    def test_tells_who_was_preempted_and_what_is_computed_again(self, world):
        engine = world.engine(num_kv_blocks=6, block_size=4, enable_prefix_caching=False)
        engine.add_request("old", token_ids(7, 1), greedy(8))
        engine.add_request("young", token_ids(6, 2), greedy(8), lora_request=world.request("qv"))

        outputs = run(engine)

        preempted = [record for record in engine.trace.records if record.preempted]
        assert [record.preempted for record in preempted] == [["young"]]
        again = [row for r in engine.trace.records for row in r.rows if row.request == "young"]
        assert [row.kind for row in again].count("prefill") == 2
        assert tokens_of(outputs["young"]) == world.oracle().greedy("qv", token_ids(6, 2), 8)
        assert outputs["young"].metrics.num_preemptions == 1

    def test_lists_the_pinned(self, world):
        engine = world.engine()
        engine.add_lora(world.request("mlp"))
        engine.pin_lora(3)
        engine.add_request("a", [5, 6], greedy(1))

        engine.step()

        assert engine.trace.records[0].pinned == ["mlp"]
