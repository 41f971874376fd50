"""One thread at a time, and Ctrl-C at any line."""

import signal
import sys
import threading
from operator import attrgetter

import pytest
from interrupts import run_attack
from patience import PATIENCE
from tiny_engine import greedy, run, tiny_world, tokens_of

from minivllm.guards.turns import Turns, no_interrupts

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


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
    @pytest.mark.parametrize(
        "call",
        [
            lambda engine, world: engine.step(),
            lambda engine, world: engine.add_request("b", PROMPT, greedy(2)),
            lambda engine, world: engine.abort_request("a"),
            lambda engine, world: engine.add_lora(world.request("qv")),
            lambda engine, world: engine.remove_lora(1),
            lambda engine, world: engine.pin_lora(1),
            lambda engine, world: engine.unpin_lora(1),
            lambda engine, world: engine.get_tokenizer(world.request("qv")),
        ],
        ids=[
            *("step", "add_request", "abort_request", "add_lora", "remove_lora", "pin_lora", "unpin_lora"),
            "get_tokenizer",
        ],
    )
    def test_is_told_how_to_do_it_while_the_first_is_in_a_step(self, world, monkeypatch, call):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(4))
        launch, answers = engine.runner.launch_model, []

        def launched(scheduled):
            if not answers:
                answers.append(in_a_thread(lambda: call(engine, world)))
            return launch(scheduled)

        monkeypatch.setattr(engine.runner, "launch_model", launched)
        outputs = [output for _ in range(4) for output in engine.step()]

        assert isinstance(answers[0], RuntimeError)
        assert "one thread at a time" in str(answers[0]) and "queue" in str(answers[0])
        assert tokens_of(outputs[-1]) == world.oracle().greedy(None, PROMPT, 4)

    def test_may_call_once_the_first_is_through(self, world):
        engine = world.engine()
        in_a_thread(lambda: engine.add_request("a", PROMPT, greedy(2)))

        outputs = [*engine.step(), *in_a_thread(engine.step)]

        assert tokens_of(outputs[-1]) == world.oracle().greedy(None, PROMPT, 2)

    def test_that_was_refused_leaves_the_first_its_turn(self):
        turns = Turns("engine")

        with turns.take():
            for _ in range(2):
                assert isinstance(in_a_thread(lambda: turns.take().__enter__()), RuntimeError)

        assert in_a_thread(lambda: turns.take().__enter__()) is None


class TestACallInTheMiddleOfAnother:
    """As a signal handler makes it, which runs between any two lines of a step."""

    @pytest.mark.parametrize("where", ["scheduler.kv_cache.allocate_slots", "runner.launch_model"])
    @pytest.mark.parametrize(
        "call",
        [
            lambda engine, world: engine.abort_request("b"),
            lambda engine, world: engine.add_request("c", PROMPT, greedy(2)),
            lambda engine, world: engine.add_lora(world.request("all")),
            lambda engine, world: engine.step(),
        ],
        ids=["abort_request", "add_request", "add_lora", "step"],
    )
    def test_is_refused_and_the_step_goes_on(self, world, monkeypatch, call, where):
        engine, errors = world.engine(), []
        for name in ("a", "b"):
            engine.add_request(name, PROMPT, greedy(6), lora_request=world.request("qv"))
        owner, _, name = where.rpartition(".")
        owner = attrgetter(owner)(engine)
        method = getattr(owner, name)

        def handled(*args):
            try:
                call(engine, world)
            except RuntimeError as error:
                errors.append(str(error))
            return method(*args)

        monkeypatch.setattr(owner, name, handled)
        outputs = run(engine)

        assert errors and all("in the middle of another call" in error for error in errors)
        for name in ("a", "b"):
            assert tokens_of(outputs[name]) == world.oracle().greedy("qv", PROMPT, 6)

    def test_is_one_no_more_after_a_call_that_was_interrupted_before_it_could_clear_up(self):
        turns = Turns("engine")
        turns._calls["now"] = (threading.get_ident(), _ended_frame())

        with turns.take():
            assert turns.torn


def _ended_frame():
    return sys._getframe()


def test_what_comes_of_somebody_elses_request_while_generate_runs_is_kept_for_its_caller(world):
    llm = world.llm()
    llm.llm_engine.add_request("theirs", PROMPT, greedy(4), lora_request=world.request("qv"))
    [mine] = llm.generate({"prompt_token_ids": PROMPT}, greedy(8), use_tqdm=False)

    heard = llm.llm_engine.step()

    assert tokens_of(mine) == world.oracle().greedy(None, PROMPT, 8)
    pieces = [token for output in heard for token in output.outputs[0].delta_token_ids]
    assert pieces == tokens_of(heard[-1]) == world.oracle().greedy("qv", PROMPT, 4)
    assert heard[-1].finished and not llm.llm_engine.has_unfinished_requests()


class TestAnInterrupt:
    def test_at_any_line_leaves_nothing_and_the_next_answers_are_right(self):
        counts = run_attack(interrupts=80, seed=7)

        assert counts["interrupted"] > 40

    def test_by_a_real_signal_does_so_too(self):
        counts = run_attack(interrupts=0, seed=7, signals=6)

        assert counts["interrupted"] == 6

    def test_makes_the_next_call_mend_first_and_an_error_does_not(self):
        mended = []
        turns = Turns("engine", lambda: mended.append("mended"))

        with pytest.raises(ValueError), turns.take():
            raise ValueError
        with turns.take():
            pass
        assert mended == []

        with pytest.raises(KeyboardInterrupt), turns.take():
            raise KeyboardInterrupt
        with turns.take():
            assert mended == ["mended"]
        with turns.take():
            pass
        assert mended == ["mended"]

    def test_that_could_not_be_mended_is_mended_by_the_call_after(self):
        attempts = []

        def mend():
            attempts.append("begun")
            if len(attempts) == 1:
                raise MemoryError

        turns = Turns("engine", mend)
        with pytest.raises(KeyboardInterrupt), turns.take():
            raise KeyboardInterrupt

        with pytest.raises(MemoryError), turns.take():
            pass
        with turns.take():
            assert attempts == ["begun", "begun"]
        with turns.take():
            pass
        assert attempts == ["begun", "begun"]

    def test_waits_while_the_last_one_is_cleared_up(self):
        done = []

        with pytest.raises(KeyboardInterrupt), no_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("cleared up")

        assert done == ["cleared up"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_turn_that_ctrl_c_ended_at_once_keeps_nobody_out():
    """It came on the very line that ends the turn, in another thread."""
    turns = Turns("engine")

    class EndedAtOnce(dict):
        def clear(self):
            raise KeyboardInterrupt

    turns._calls = EndedAtOnce()

    def call():
        with turns.take():
            pass

    assert isinstance(in_a_thread(call), KeyboardInterrupt)
    turns._calls = dict(turns._calls)
    assert turns._calls, "the turn was to be left behind"

    with turns.take():
        assert isinstance(in_a_thread(call), RuntimeError)
    assert in_a_thread(call) is None
