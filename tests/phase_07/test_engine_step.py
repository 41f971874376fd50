"""One step of the engine after another gives PEFT's tokens (lab 7.4)."""

import shutil
from types import SimpleNamespace

import pytest

from minivllm import LoRARequest
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
