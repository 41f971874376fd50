"""One call of an engine at a time, and what a call that was broken off leaves: an engine that has to be made anew."""

import signal
import threading
from operator import attrgetter

import pytest

from labs.kit.overlay import Todo
from minivllm.engine.llm_engine import EngineBusy
from minivllm.errors import EngineDeadError
from tests.oracles.invariants import check_engine
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.waiting import PATIENCE

PROMPT = [5, 6, 7, 8, 9]

CALLS = {
    "step": lambda engine, world: engine.step(),
    "add_request": lambda engine, world: engine.add_request("b", PROMPT, greedy(2)),
    "abort_request": lambda engine, world: engine.abort_request("a"),
    "add_lora": lambda engine, world: engine.add_lora(world.request("qv")),
    "remove_lora": lambda engine, world: engine.remove_lora(1),
    "pin_lora": lambda engine, world: engine.pin_lora(1),
    "unpin_lora": lambda engine, world: engine.unpin_lora(1),
    "get_tokenizer": lambda engine, world: engine.get_tokenizer(world.request("qv")),
}


def in_a_thread(function):
    """Its result, or what it raised."""
    box = []

    def call():
        try:
            box.append(function())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(PATIENCE)
    return box[0]


class TestASecondThread:
    def test_is_refused_while_the_first_is_in_a_step(self, world, monkeypatch):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4))
        launch, answers = engine.runner.launch_model, {}

        def launched(scheduled):
            for name, call in CALLS.items():
                answers[name] = in_a_thread(lambda call=call: call(engine, world))
            return launch(scheduled)

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "launch_model", launched)
            engine.step()
        outputs = [output for _ in range(3) for output in in_a_thread(engine.step)]  # the first is through

        let_in = [name for name, answer in answers.items() if not isinstance(answer, RuntimeError)]
        assert (list(answers), let_in) == (list(CALLS), []), "every call is tried, and none is let in"
        assert tokens_of(outputs[-1]) == world.oracle().greedy(None, PROMPT, 4)


@pytest.mark.parametrize("where", ["scheduler.kv_cache.allocate_slots", "runner.launch_model"])
def test_a_call_in_the_middle_of_another_is_refused_and_the_step_goes_on(world, monkeypatch, where):
    """As a signal handler makes it, which runs between any two lines of a step."""
    engine, refused = world.engine(), 0
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, greedy(6), lora_request=world.request("qv"))
    owner, _, name = where.rpartition(".")
    owner = attrgetter(owner)(engine)
    method = getattr(owner, name)

    def handled(*args):
        nonlocal refused
        for call in CALLS.values():
            with pytest.raises(RuntimeError):
                call(engine, world)
            refused += 1
        return method(*args)

    monkeypatch.setattr(owner, name, handled)
    outputs = run(engine)

    assert refused
    for name in ("a", "b"):
        assert tokens_of(outputs[name]) == world.oracle().greedy("qv", PROMPT, 6)


def test_whoever_is_refused_is_told_why_in_a_kind_of_its_own(world, monkeypatch):
    """Apart from the refusal itself, by which somebody's fix is judged whose words are others (hunt 8.28)."""
    engine, answers = world.engine(), []
    engine.add_request("a", PROMPT, greedy(1))
    launch = engine.runner.launch_model

    def launched(scheduled):
        answers.append(in_a_thread(engine.step))
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            engine.step()
        return launch(scheduled)

    monkeypatch.setattr(engine.runner, "launch_model", launched)
    engine.step()

    assert isinstance(answers[0], EngineBusy)
    assert "one thread at a time" in str(answers[0]) and "queue" in str(answers[0])


def raising(error):
    def method(*args, **options):
        raise error

    return method


class TestBrokenOff:
    @pytest.mark.parametrize(
        ("where", "error"),
        [
            ("scheduler.schedule", KeyboardInterrupt()),
            ("runner.launch_model", SystemExit()),
            ("runner.launch_model", Todo("7.4", "x")),
            ("scheduler.update_from_output", KeyboardInterrupt()),
        ],
        ids=repr,
    )
    def test_in_a_step_each_later_call_says_that_the_engine_has_to_be_made_anew(
        self, world, monkeypatch, error, where
    ):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4))
        owner, _, name = where.rpartition(".")
        with monkeypatch.context() as patch:
            patch.setattr(attrgetter(owner)(engine), name, raising(error))
            with pytest.raises(type(error)):
                engine.step()

        for call in CALLS.values():
            with pytest.raises(RuntimeError, match=r"was broken off \(.*make a new engine$"):
                call(engine, world)

    @pytest.mark.parametrize(
        ("where", "error"),
        [
            ("scheduler.schedule", MemoryError()),
            ("scheduler.kv_cache.allocate_slots", ValueError("odd")),
            ("scheduler.update_from_output", MemoryError()),
        ],
        ids=repr,
    )
    def test_where_decisions_are_made_any_error_ends_the_engine(self, world, monkeypatch, error, where):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4))
        owner, _, name = where.rpartition(".")
        monkeypatch.setattr(attrgetter(owner)(engine), name, raising(error))
        with pytest.raises(type(error)):
            engine.step()

        with pytest.raises(EngineDeadError, match=type(error).__name__ if not str(error) else "odd"):
            engine.step()

    def test_while_a_request_is_added_too(self, world, monkeypatch):
        engine = world.engine()
        monkeypatch.setattr(engine.scheduler, "add_request", raising(MemoryError()))
        with pytest.raises(MemoryError):
            engine.add_request("a", PROMPT, greedy(4))

        with pytest.raises(EngineDeadError, match="make a new engine"):
            engine.add_request("b", PROMPT, greedy(4))

    def test_by_a_real_ctrl_c(self, world, monkeypatch):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4))
        launch = engine.runner.launch_model
        monkeypatch.setattr(
            engine.runner, "launch_model", lambda step: signal.raise_signal(signal.SIGINT) or launch(step)
        )
        with pytest.raises(KeyboardInterrupt):
            engine.step()

        with pytest.raises(EngineDeadError, match=r"broken off \(KeyboardInterrupt\)"):
            engine.step()


class TestARefusal:
    """It is raised before anything has changed, so the engine goes on."""

    REFUSED = (
        lambda engine, world: engine.add_request("b", [], greedy(2)),
        lambda engine, world: engine.add_request("a", PROMPT, greedy(2)),
        lambda engine, world: engine.add_request("b", PROMPT, None),
        lambda engine, world: engine.abort_request([["a"]]),
        lambda engine, world: engine.abort_request(5),
        lambda engine, world: engine.pin_lora(9),
        lambda engine, world: engine.remove_lora([1]),
        lambda engine, world: engine.add_lora("qv"),
        lambda engine, world: engine.add_lora(world.request("qv", lora_path="/nowhere")),
        lambda engine, world: engine.get_tokenizer("nobody"),
    )

    def test_leaves_the_engine_to_its_other_requests(self, world):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4))
        engine.step()
        blocks = engine.scheduler.requests["a"].block_ids

        for call in self.REFUSED:
            with pytest.raises((ValueError, TypeError, FileNotFoundError)):
                call(engine, world)

        assert engine.scheduler.requests["a"].block_ids is blocks
        assert tokens_of(run(engine)["a"]) == world.oracle().greedy(None, PROMPT, 4)
        check_engine(engine, [])

    def test_of_an_engine_that_has_lost_a_rank_is_at_once(self, world):
        engine = world.engine()
        engine.executor.error = EngineDeadError("rank 1 of 2 has ended")

        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            engine.add_request("a", PROMPT, greedy(4), lora_request=world.request("qv"))

        assert not engine.has_unfinished_requests() and not engine.adapters.adapters

    @pytest.mark.parametrize(
        ("where", "error"),
        [
            ("add_adapter", MemoryError()),
            ("pin_adapter", RuntimeError("out of memory")),
            ("pin_adapter", KeyError("weight")),
        ],
        ids=repr,
    )
    def test_so_is_what_an_adapter_raises_that_was_to_be_pinned(self, world, monkeypatch, error, where):
        engine = world.engine()
        for name in world.names:
            engine.add_lora(world.request(name))
        engine.add_lora(world.request("qv", lora_int_id=9, lora_name="ninth"))
        lost = next(i for i in range(1, 5) if i not in engine.list_loras())
        with monkeypatch.context() as patch:
            patch.setattr(engine.adapters.worker, where, raising(error))
            with pytest.raises(type(error)):
                engine.pin_lora(lost)

        assert not engine.adapters.manager.pinned_adapters and not engine.adapters.pinned
        assert engine.pin_lora(lost) and engine.adapters.manager.pinned_adapters == {lost}
        engine.add_request("a", PROMPT, greedy(4), lora_request=world.request(world.names[lost - 1]))
        assert tokens_of(run(engine)["a"]) == world.oracle().greedy(world.names[lost - 1], PROMPT, 4)
