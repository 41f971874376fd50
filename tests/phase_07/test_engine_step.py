"""One step of the engine after another gives PEFT's tokens (lab 7.4), and what the record of a step says."""

import json
import shutil
from types import SimpleNamespace

import pytest

from minivllm import LoRARequest
from minivllm.observe.trace import SlotEvent, Trace, TraceSkip
from tests.oracles.recorded import RecordedWorld
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.models import character_backend, token_ids

lab = pytest.mark.lab("7.4")


@pytest.fixture
def world():
    return RecordedWorld()


def spoiled(world, folder):
    """An adapter that is found bad only when it is read."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(world.path("qv"), folder)
    path = folder / "adapter_model.safetensors"
    save_file({name: weight * float("nan") for name, weight in load_file(path).items()}, path)
    return LoRARequest("bad", 9, str(folder))


@lab
def test_every_request_gets_one_token_a_step_and_ends_once(world):
    engine = world.engine()
    engine.add_request("a", [5, 6, 7], greedy(3), lora_request=world.request("qv"))
    engine.add_request("b", [5, 6, 7], greedy(2))

    steps = [engine.step() for _ in range(4)]

    seen = [[(o.request_id, o.outputs[0].delta_token_ids, o.finished) for o in step] for step in steps]
    [a1, a2, a3], [b1, b2] = (world.oracle().greedy(n, [5, 6, 7], k) for n, k in (("qv", 3), (None, 2)))
    assert seen == [
        [("a", [a1], False), ("b", [b1], False)],
        [("a", [a2], False), ("b", [b2], True)],
        [("a", [a3], True)],
        [],
    ]
    assert not engine.has_unfinished_requests()


@lab
def test_a_mixed_batch_with_more_adapters_than_slots_equals_peft(world):
    engine = world.engine(max_loras=2, max_num_batched_tokens=12, num_kv_blocks=40)
    prompts = [(name, token_ids(4 + 3 * i, i)) for i, name in enumerate([None, *world.names] * 2)]

    for i, (name, prompt) in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(6), lora_request=world.request(name))
    outputs = run(engine)

    for i, (name, prompt) in enumerate(prompts):
        assert tokens_of(outputs[str(i)]) == world.oracle().greedy(name, prompt, 6), f"{i}: {name}"


def test_an_adapter_that_cannot_be_read_ends_its_requests_and_no_other(world, tmp_path):
    engine = world.engine()
    bad = spoiled(world, tmp_path / "bad")
    engine.add_request("good", [5, 6], greedy(4), lora_request=world.request("all"))
    engine.add_request("bad 1", [5, 6], greedy(4), lora_request=bad)
    engine.add_request("base", [5, 6], greedy(4))
    engine.add_request("bad 2", [5, 6, 7], greedy(4), lora_request=bad)

    outputs = run(engine)

    for name, adapter in (("good", "all"), ("base", None)):
        assert tokens_of(outputs[name]) == world.oracle().greedy(adapter, [5, 6], 4)
        admitted = outputs[name].metrics.first_scheduled_time
        assert admitted is not None, "it was in the step that was dropped"
    for name in ("bad 1", "bad 2"):
        assert outputs[name].outputs[0].finish_reason == "error"
        assert "adapter 'bad'" in outputs[name].error and "NaN" in outputs[name].error


@lab
def test_a_stop_string_ends_the_request_at_once(world):
    backend = character_backend()
    engine = world.engine(tokenizer=SimpleNamespace(backend_tokenizer=backend))
    answer = backend.decode(world.oracle().greedy("qv", [5, 6, 7], 8))
    stop = answer[2:4]

    engine.add_request("a", [5, 6, 7], greedy(8, stop=stop), lora_request=world.request("qv"))
    output = run(engine)["a"].outputs[0]

    assert output.text == answer[: answer.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert engine.get_metrics()["scheduler"]["num_running_reqs"] == 0


@lab
@pytest.mark.parametrize("fails", ["launch_model", "sample_tokens"])
def test_a_pass_that_fails_ends_the_requests_of_its_step_and_counts_for_nothing(world, monkeypatch, fails):
    engine = world.engine(max_num_batched_tokens=8)
    for name in (None, "qv", "all"):
        engine.add_request(str(name), token_ids(7, 1), greedy(4), lora_request=world.request(name))

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, fails, lambda *args: 1 / 0)
        ended = engine.step()

    assert [output.request_id for output in ended] == ["None", "qv"], (
        "7 tokens and 1 more were to be computed"
    )
    assert {output.outputs[0].finish_reason for output in ended} == {"error"}
    assert engine.get_metrics()["scheduler"]["num_computed_tokens"] == 0
    for name in (None, "qv"):
        engine.add_request(str(name), token_ids(7, 1), greedy(4), lora_request=world.request(name))
    outputs = run(engine)
    for name in (None, "qv", "all"):
        assert outputs[str(name)].num_cached_tokens == 0
        assert tokens_of(outputs[str(name)]) == world.oracle().greedy(name, token_ids(7, 1), 4)


class TestRecord:
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

    def test_is_json_a_line_and_comes_back(self, world, tmp_path):
        engine = world.engine(max_loras=1)
        for i, name in enumerate([None, *world.names]):
            engine.add_request(str(i), token_ids(5, i), greedy(3), lora_request=world.request(name))
        run(engine)

        engine.trace.write_jsonl(tmp_path / "trace.jsonl")

        lines = (tmp_path / "trace.jsonl").read_text().splitlines()
        assert len([json.loads(line) for line in lines]) == len(engine.trace)
        assert Trace.read_jsonl(tmp_path / "trace.jsonl").records == engine.trace.records
