"""Each example runs, and shows what it says: answers are those of the adapters' tasks, which code has made."""

import asyncio
import gc
import logging

import pytest

import examples.common
from adapters.recipe import tasks
from examples import (
    basic,
    debug_collector,
    error_handler,
    memory_while_serving,
    monitor,
    performance_monitor,
    presets,
    profiling,
    quantized_base,
    several_adapters,
    switching,
)
from minivllm import AsyncLLM
from minivllm.errors import EngineDeadError

NAMES = examples.common.NAMES


@pytest.fixture(autouse=True)
def one_engine_at_a_time():
    """An example's engine goes before the next one comes: each takes more than 1 GB."""
    yield
    gc.collect()


@pytest.fixture(scope="class")
def engine():
    """Two slots, for all examples that do not ask for another engine."""
    yield examples.common.make_engine()


@pytest.fixture(scope="module")
def right():
    """Adapter -> the answer to its question."""
    found = {name: {e.text: e.answer for e in tasks.examples(name, 4)} for name in NAMES}
    return {name: found[name][question] for name, question in examples.common.QUESTIONS.items()}


@pytest.mark.nightly
def test_basic_answers_with_the_adapter_and_not_without(right):
    answers = basic.main()

    assert answers["with the adapter"] == right["sql"] != answers["without"]


class TestOnOneEngine:
    @pytest.mark.nightly
    def test_several_adapters_answer_in_one_batch_and_one_is_unloaded(self, engine, right):
        answers = several_adapters.main(engine)

        assert {name: answers[name] for name in NAMES} == right
        assert answers["base"] not in right.values()
        assert engine.list_loras() == {2, 3, 4}
        assert engine.trace.summary()["mixed_steps"] > 0

    @pytest.mark.nightly
    def test_switching_takes_more_steps_than_mixing(self, engine):
        steps = switching.main(engine)

        assert steps["in_groups"] > 1.5 * steps["ask"]

    @pytest.mark.nightly
    def test_the_monitor_counts_as_the_engine_does(self, engine):
        engine.remove_lora(1)
        before = dict(engine.get_metrics()["lora"])

        stats = monitor.main(engine)

        after = engine.get_metrics()["lora"]
        assert stats["evictions"] == after["evictions"] - before["evictions"] > 0
        misses = after["misses"] - before["misses"]
        assert round(stats["hit_rate"] * 8) == 8 - misses

    @pytest.mark.nightly
    def test_the_performance_monitor_has_each_batch_size(self, engine):
        stats = performance_monitor.main(engine)

        assert {1, 2, 3, 4} <= stats["avg_forward_ms"].keys()
        assert all(0 < ms < 60_000 for ms in stats["avg_forward_ms"].values())
        assert stats["peak_memory_mb"]["process"] > 500

    @pytest.mark.nightly
    def test_the_debug_report_has_what_was_refused(self, engine, tmp_path, capsys):
        level = logging.getLogger("minivllm.lora").level

        report = debug_collector.main(engine, tmp_path / "out" / "debug.json")

        assert (tmp_path / "out" / "debug.json").stat().st_size > 1000
        assert "sqll" in report["error_logs"]["recent"][-1]["reason"]
        assert {info["name"] for info in report["active_loras"]} >= {"json", "sql", "bullets"}
        assert logging.getLogger("minivllm.lora").level == level

    @pytest.mark.nightly
    def test_the_error_handler_says_what_is_wrong_and_serves_on(self, engine, right, tmp_path):
        told = error_handler.main(engine, tmp_path)

        assert told["fine"] == "ready"
        assert told["missing"].startswith("missing: adapter 'typo': ")
        assert told["damaged"].startswith("unfit: adapter 'truncated': ")
        assert told["again"] == right["sql"]

    @pytest.mark.nightly
    def test_profiling_compares_adapters_with_the_base_model(self, engine):
        found = profiling.main(engine, rounds=1)

        assert found["base"] > 0 and found["overhead"] > -0.9

    @pytest.mark.nightly
    def test_less_memory_in_the_middle_changes_no_answer(self, engine):
        told = memory_while_serving.main(engine)

        assert told["same"] and told["left"] == 1
        assert told["after"] <= told["before"] / 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("memory", ["bullets"]),
        ("latency", ["json", "sql", "bullets"]),
        ("throughput", list(NAMES)),
        ("production", list(NAMES)),
    ],
)
def test_a_preset_takes_what_was_predicted_and_serves_the_ranks_it_has_room_for(name, served):
    told = presets.main((name,))[name]

    assert told["served"] == served
    assert told["slots"] == told["predicted"]


@pytest.mark.nightly
def test_adapters_answer_alike_on_a_base_in_int8(right):
    answers = quantized_base.main()

    assert answers["dates"] == right["dates"] and answers["sql"] == right["sql"]


@pytest.mark.nightly
def test_the_web_server_loads_answers_lists_and_unloads(right):
    from fastapi.testclient import TestClient

    from examples.fastapi_server import make_app

    questions = examples.common.QUESTIONS
    llm = AsyncLLM.from_engine(examples.common.make_engine())
    with TestClient(make_app(llm)) as client:

        def generate(**asked):
            return client.post("/generate", json=asked)

        answer = generate(prompt=questions["sql"], lora_name="sql", lora_path="sql").json()
        assert answer == {"text": right["sql"], "adapter": "sql"}
        assert generate(prompt=questions["sql"], max_tokens=4).json()["text"] not in right.values()
        assert client.post("/adapters", json={"lora_name": "dates", "lora_path": "dates"}).status_code == 200
        assert client.get("/adapters").json() == {"loaded": ["dates", "sql"], "in_memory": ["dates", "sql"]}
        assert generate(prompt=questions["dates"], lora_name="dates").json()["text"] == right["dates"]

        assert generate(prompt="x", lora_name="nobody").status_code == 404
        assert generate(prompt="x", lora_name="a", lora_path="../tests").status_code == 403
        assert generate(prompt="x", lora_name="a", lora_path="sqll").status_code == 404
        assert generate(prompt="x", max_tokens=0).status_code == 400

        assert client.delete("/adapters/sql").json() == {"removed": True}
        assert client.get("/adapters").json() == {"loaded": ["dates"], "in_memory": ["dates"]}
    with pytest.raises(EngineDeadError):
        asyncio.run(llm.check_health())
