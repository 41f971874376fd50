"""The order of things in one step of the engine, and who hears of it (lab 7.4). No oracle: weights are random."""

import math

import pytest

from minivllm import LoRARequest, SamplingParams
from minivllm.core.request import RequestStatus
from tests.worlds.small import SmallWorld, write_adapter

pytestmark = pytest.mark.lab("7.4")


@pytest.fixture
def world(tmp_path):
    return SmallWorld(tmp_path)


def greedy(max_tokens=4, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def bad_adapter(world):
    """An adapter that is found bad only when its weights are read."""
    folder = world.folder / "bad"
    write_adapter(folder, seed=9, factor=math.nan)
    return LoRARequest("bad", 9, str(folder))


def run(engine, max_steps=100):
    """Step until nothing is left: request id -> its outputs."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return outputs
        for output in step(engine):
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"{engine.get_num_unfinished_requests()} requests are left after {max_steps} steps")


def step(engine):
    """Its outputs; an error of one request must not end the step of all."""
    try:
        return engine.step()
    except (OSError, ValueError) as error:
        pytest.fail(
            f"step() raises {type(error).__name__}: nobody is answered, "
            f"and {engine.get_num_unfinished_requests()} requests are left in the engine"
        )


def ids(outputs):
    return [output.request_id for output in outputs]


def test_a_step_without_requests_does_nothing(world, monkeypatch):
    engine, launched = world.engine(), []
    monkeypatch.setattr(engine.executor, "launch_model", launched.append)

    assert engine.step() == []
    assert launched == []
    assert engine.get_metrics()["steps"] == 0
    assert len(engine.trace) == 0


def test_a_step_is_launched_as_its_class_says(world, monkeypatch):
    """`_launch` notes whose pass it is, so that an error ends the requests of the pass."""
    engine, launched = world.engine(), []
    launch = engine.core._launch
    monkeypatch.setattr(engine.core, "_launch", lambda step: launched.append(step) or launch(step))
    monkeypatch.setattr(engine.core, "_end_pass", lambda: None)
    engine.add_request("a", [5, 6], greedy(1))

    engine.core._step([])

    assert len(launched) == 1, f"`_launch` was called {len(launched)} times for a step that computes 2 tokens"


def logged_passes(engine, monkeypatch):
    """A list that grows by `launch_model` and `sample_tokens`, each when it is called."""
    log = []
    for name in ("launch_model", "sample_tokens"):
        function = getattr(engine.runner, name)
        monkeypatch.setattr(
            engine.runner, name, lambda step, function=function, name=name: log.append(name) or function(step)
        )
    return log


def test_listeners_hear_of_a_step_while_it_runs(world, monkeypatch):
    engine = world.engine()
    log = logged_passes(engine, monkeypatch)
    for name in ("first", "second"):
        engine.listeners.append(
            lambda scheduled, name=name: log.append(f"{name} of {len(scheduled.scheduled)}")
        )
    engine.add_request("a", [5, 6], greedy(1))

    engine.step()

    told = ["launch_model", "first of 1", "second of 1", "sample_tokens"]
    assert log == told, "a GPU's computing hides what listeners do; with the tokens it is over"


def test_reloads_are_settled_before_the_scheduler_decides(world, monkeypatch):
    engine, log = world.engine(), []
    for owner, name in ((engine.core, "_settle_adapters"), (engine.scheduler, "schedule")):
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, function=function, name=name: log.append(name) or function(*args)
        )
    engine.add_request("a", [5, 6], greedy(1))

    engine.core._step([])

    told = "the scheduler is to see reloads and unloads whose time has come as done"
    assert log == ["_settle_adapters", "schedule"], told


def test_a_chunk_that_samples_nothing_has_no_output(world):
    engine = world.engine(max_num_batched_tokens=4)
    engine.add_request("a", list(range(10, 19)), greedy(1))

    steps = [ids(engine.step()) for _ in range(3)]

    assert steps == [[], [], ["a"]], "9 tokens of a prompt, 4 a step"


def test_nothing_counts_as_computed_before_the_tokens_are_there(world, monkeypatch):
    engine = world.engine()
    engine.add_request("a", [5, 6, 7], greedy(2))
    sample, seen = engine.runner.sample_tokens, []

    def watched(step):
        seen.append(engine.scheduler.requests["a"].num_computed_tokens)
        return sample(step)

    monkeypatch.setattr(engine.runner, "sample_tokens", watched)
    engine.step()
    engine.step()

    assert seen == [0, 3], "tokens computed, as the scheduler knew before each step's tokens were read"


def test_logprobs_go_to_who_asked_for_them(world):
    engine = world.engine()
    engine.add_request("with", [5, 6, 7], greedy(2, logprobs=2), lora_request=world.request(1))
    engine.add_request("without", [5, 6, 7], greedy(2))

    outputs = run(engine)

    [*_, last] = outputs["with"]
    logprobs = last.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == 2, "one dict of logprobs a token"
    assert all(token in of for token, of in zip(last.outputs[0].token_ids, logprobs))
    assert outputs["without"][-1].outputs[0].logprobs is None


def test_an_admission_is_noted_with_its_time(world):
    engine = world.engine()
    engine.add_request("a", [5, 6, 7], greedy(1))

    [output] = engine.step()

    admitted, answered = output.metrics.first_scheduled_time, output.metrics.first_token_time
    assert admitted is not None, "the output processor was not told: mark_scheduled"
    assert admitted <= answered


def test_a_request_that_can_never_have_a_slot_is_answered_with_the_reason(world):
    engine = world.engine(max_loras=1)
    engine.add_lora(world.request(1))
    engine.add_request("waits", [5, 6], greedy(), lora_request=world.request(2))
    engine.pin_lora(1)

    outputs = engine.step()

    assert ids(outputs) == ["waits"]
    assert outputs[0].finished
    assert "all 1 are pinned" in outputs[0].error
    assert not engine.has_unfinished_requests()


def test_an_adapter_that_cannot_be_read_ends_its_requests_and_drops_the_step(world):
    engine = world.engine()
    engine.add_request("good", [5, 6], greedy(2), lora_request=world.request(1))
    engine.add_request("bad 1", [5, 6], greedy(2), lora_request=bad_adapter(world))
    engine.add_request("bad 2", [5, 6, 7], greedy(2), lora_request=bad_adapter(world))

    first, second = step(engine), step(engine)

    assert ids(first) == ["bad 1", "bad 2"], "the step is dropped: nobody gets a token in it"
    for output in first:
        assert output.outputs[0].finish_reason == "error"
        assert "adapter 'bad'" in output.error and "NaN" in output.error
    assert ids(second) == ["good"], "the others go on with the next step"
    assert second[0].metrics.first_scheduled_time is not None, (
        "the dropped step admitted it, and the output processor heard nothing of that (`mark_scheduled`)"
    )


def watch_launches(engine, monkeypatch):
    """What is in memory whenever a step is launched."""
    launch, seen = engine.runner.launch_model, []

    def launched(scheduled):
        seen.append(engine.list_loras())
        return launch(scheduled)

    monkeypatch.setattr(engine.runner, "launch_model", launched)
    return seen


def test_what_a_step_needs_is_in_memory_before_it_is_launched(world, monkeypatch):
    engine = world.engine()
    launches = watch_launches(engine, monkeypatch)
    engine.add_request("a", [5, 6, 7], greedy(1), lora_request=world.request(1))
    engine.add_request("b", [5, 6, 7], greedy(1), lora_request=world.request(2))

    engine.step()

    assert launches == [{1, 2}], "read during the pass, an adapter holds up everybody's step"


def test_a_step_whose_adapter_cannot_be_read_is_not_launched_nor_counted_nor_recorded(world, monkeypatch):
    engine = world.engine()
    launches = watch_launches(engine, monkeypatch)
    engine.add_request("a", [5, 6, 7], greedy(1))
    engine.add_request("b", [5, 6, 7], greedy(1), lora_request=bad_adapter(world))

    outputs = engine.step()

    assert ids(outputs) == ["b"]
    assert launches == [], "a step is launched whose adapter could not be read: `_prepare_adapters` says so"
    assert engine.get_metrics()["steps"] == len(engine.trace) == 0
    assert engine.get_metrics()["finished"] == {"error": 1}


def test_requests_that_waited_for_a_reload_that_fails_end_with_the_reason(world):
    engine = world.engine()
    engine.add_request("old", [5, 6], greedy(2), lora_request=world.request(1))
    engine.step()
    write_adapter(world.folder / "adapter1", seed=1, factor=math.nan)
    engine.add_request("new", [5, 6], greedy(2), lora_request=world.request(1, load_inplace=True))

    outputs = run(engine)

    assert outputs["old"][-1].outputs[0].finish_reason == "length"
    assert sorted(outputs) == ["new", "old"], "each of the two must be answered"
    assert outputs["new"][-1].outputs[0].finish_reason == "error", "see _settle_adapters"
    assert "NaN" in outputs["new"][-1].error


def test_everybody_who_ends_in_a_dropped_step_is_answered(world):
    """One waited for a reload that fails, another's adapter cannot be read, in the same step."""
    engine = world.engine()
    engine.add_request("old", [5, 6], greedy(2), lora_request=world.request(1))
    engine.step()
    write_adapter(world.folder / "adapter1", seed=1, factor=math.nan)
    engine.add_request("reload", [5, 6], greedy(2), lora_request=world.request(1, load_inplace=True))
    engine.step()
    engine.add_request("bad", [5, 6], greedy(), lora_request=bad_adapter(world))

    outputs = step(engine)

    assert sorted(ids(outputs)) == ["bad", "reload"]
    assert all(output.finished for output in outputs)


def test_a_row_that_cannot_be_sampled_ends_its_request_and_no_other(world, monkeypatch):
    engine = world.engine()
    for name in ("good", "bad"):
        engine.add_request(name, [5, 6, 7], greedy(2))
    sample = engine.runner.sample_tokens

    def without_bad(step):
        sampled = sample(step)
        if sampled.pop("bad", None) is not None:
            step.errors["bad"] = ValueError("no number in this row")
        return sampled

    monkeypatch.setattr(engine.runner, "sample_tokens", without_bad)

    outputs = run(engine)

    assert [output.outputs[0].finish_reason for output in outputs["bad"]] == ["error"]
    assert "no number in this row" in outputs["bad"][0].error
    assert [len(output.outputs[0].token_ids) for output in outputs["good"]] == [1, 2]


def test_adapters_for_the_next_step_are_copied_while_this_one_runs(world, monkeypatch):
    engine = world.engine()
    log = logged_passes(engine, monkeypatch)
    monkeypatch.setattr(engine.runner, "prefetch_lora", lambda adapter_id: log.append(f"copy {adapter_id}"))
    engine.scheduler.can_prefetch = lambda adapter_id: adapter_id in (1, 2)
    engine.add_request("runs", [5, 6], greedy(3))
    engine.step()
    for name in (2, 1):
        engine.add_request(f"next {name}", [5, 6], greedy(2), lora_request=world.request(name))

    log.clear()
    engine.step()

    told = ["launch_model", "copy 2", "copy 1", "sample_tokens"]
    assert log == told, "a GPU's computing hides the copies of all adapters in `prefetch`"


def test_who_leaves_while_the_step_runs_gets_no_output(world):
    """It has a token, and nobody is there to have it: the scheduler names those that are."""
    engine = world.engine()
    for name in ("leaves", "stays"):
        engine.add_request(name, [5, 6], greedy(2))
    ended = RequestStatus.FINISHED_ABORTED
    engine.listeners.append(lambda scheduled: engine.scheduler.finish_requests("leaves", ended))

    outputs = step(engine)

    assert ids(outputs) == ["stays"]


def test_an_output_that_was_made_is_kept_though_the_next_one_fails(world, monkeypatch):
    """The engine is of no use then, and who has an answer already is told it."""
    engine = world.engine()
    for name in ("first", "second"):
        engine.add_request(name, [5, 6], greedy(2))
    process = engine.core.output_processor.process

    def processed(request, logprobs=None):
        if request.request_id == "second":
            raise MemoryError
        return process(request, logprobs)

    monkeypatch.setattr(engine.core.output_processor, "process", processed)
    outputs = []

    with pytest.raises(MemoryError):
        engine.core._step(outputs)

    assert ids(outputs) == ["first"], "what is new of a request goes into `outputs` at once"


def test_a_step_is_counted_with_its_time_and_that_of_the_pass(world):
    engine = world.engine()
    engine.add_request("a", [5, 6, 7], greedy(2), lora_request=world.request(1))

    run(engine)

    metrics = engine.get_metrics()
    assert metrics["steps"] == 2
    assert metrics["step_seconds"] >= metrics["forward_seconds"] > 0
    assert metrics["finished"] == {"length": 1}
    assert metrics["scheduler"]["num_sampled_tokens"] == 2


def test_the_time_of_the_pass_is_that_from_launch_to_tokens(world, monkeypatch):
    """By a clock that only the parts of a step move, one of them a reload whose time has come."""
    engine = world.engine()
    engine.add_lora(world.request(1))
    engine.core.adapters.noted.add(1)
    now = [100.0]
    monkeypatch.setattr(engine.core, "clock", lambda: now[0])

    def timed(function, seconds):
        def run(*args):
            now[0] += seconds
            return function(*args)

        return run

    parts = {
        (engine.core.adapters, "settle"): 16,
        (engine.scheduler, "schedule"): 8,
        (engine.core.adapters, "prepare"): 32,
        (engine.runner, "launch_model"): 1,
        (engine.runner, "sample_tokens"): 2,
        (engine.scheduler, "update_from_output"): 4,
    }
    for (owner, name), seconds in parts.items():
        monkeypatch.setattr(owner, name, timed(getattr(owner, name), seconds))
    engine.listeners.append(timed(lambda scheduled: None, 64))
    engine.add_request("a", [5, 6, 7], greedy(1))

    engine.step()

    metrics = engine.get_metrics()
    seconds = {name: took for (_, name), took in parts.items()} | {"a listener": 64}
    assert (metrics["step_seconds"], metrics["forward_seconds"]) == (127, 67), (
        f"the step takes all of {seconds}, the pass what is between launch and tokens: 1 + 64 + 2"
    )


def test_a_record_shows_the_step_as_it_was_launched(world):
    """Recorded after its tokens are committed, a prompt's last chunk would look like a decode."""
    engine = world.engine(max_num_batched_tokens=4)
    engine.add_request("a", list(range(10, 19)), greedy(2), lora_request=world.request(1))

    run(engine)

    rows = [(record.step, row.tokens, row.kind) for record in engine.trace.records for row in record.rows]
    assert rows == [(0, 4, "chunk"), (1, 4, "chunk"), (2, 1, "chunk"), (3, 1, "decode")], (
        "(step, tokens, kind)"
    )
