"""Calls from any thread, run in the engine's (lab 9.1). The oracle is a list of what was called."""

import queue
import threading
from concurrent.futures import CancelledError, Future

import pytest
from patience import ends

from labs.kit.overlay import Todo
from minivllm.serving.errors import EngineDeadError
from minivllm.serving.hand_over import HandOver

pytestmark = pytest.mark.lab("9.1")

GONE = EngineDeadError("it has ended")


@pytest.fixture
def hand_over():
    return HandOver()


def in_a_thread(function):
    """A daemon: one that is never called must not keep the tests from ending."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def turn(hand_over, engine=None, wait=False):
    """Run the calls there are, in a thread, which must come back; what it raises is raised here. Returns its id."""
    raised = []

    def run():
        try:
            hand_over.run(engine, wait=wait)
        except BaseException as error:
            raised.append(error)

    thread = in_a_thread(run)
    assert ends(thread), "the engine's thread waits for a call that nobody makes"
    if raised:
        raise raised[0]
    return thread.ident


class TestCalls:
    def test_wait_until_they_are_run_and_get_what_they_asked_for(self, hand_over):
        futures = [hand_over.call(lambda engine, i=i: (engine, i)) for i in range(3)]
        assert not any(future.done() for future in futures)

        turn(hand_over, "the engine")

        assert [future.result(0) for future in futures] == [("the engine", i) for i in range(3)]

    def test_are_run_one_after_the_other_in_the_thread_that_has_the_engine(self, hand_over):
        seen = []
        for i in range(20):
            hand_over.call(lambda engine, i=i: seen.append((i, threading.get_ident())))

        thread_id = turn(hand_over, wait=True)

        assert seen == [(i, thread_id) for i in range(20)]

    def test_of_calls_are_run_in_the_same_turn(self, hand_over):
        seen = []
        hand_over.call(lambda engine: hand_over.call(lambda engine: seen.append("inner")))

        turn(hand_over)

        assert seen == ["inner"]
        assert not hand_over.waits

    def test_come_from_many_threads_and_each_is_run_once(self, hand_over):
        seen, enough = [], 8 * 50

        def engine_thread():
            while len(seen) < enough:
                hand_over.run(None, wait=True)

        engine = in_a_thread(engine_thread)
        callers = [
            in_a_thread(lambda k=k: [hand_over.call(lambda _, i=i: seen.append((k, i))) for i in range(50)])
            for k in range(8)
        ]

        assert ends(engine) and all(map(ends, callers))
        assert sorted(seen) == [(k, i) for k in range(8) for i in range(50)]
        assert all([i for caller, i in seen if caller == k] == list(range(50)) for k in range(8))


class TestARun:
    def test_without_calls_does_nothing(self, hand_over):
        turn(hand_over)

        assert not hand_over.waits

    def test_waits_for_one_call_and_for_no_second(self, hand_over):
        runner = in_a_thread(lambda: hand_over.run("engine", wait=True))
        assert runner.is_alive()

        future = hand_over.call(lambda engine: engine)

        assert ends(runner)
        assert future.result(0) == "engine"


class TestAnError:
    def test_is_its_callers_and_nobody_elses(self, hand_over):
        error = KeyError("no such adapter")

        def fail(engine):
            raise error

        bad, good = hand_over.call(fail), hand_over.call(lambda engine: 7)
        turn(hand_over)

        assert bad.exception(0) is error
        assert good.result(0) == 7

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Todo])
    def test_that_is_nobodys_fault_is_raised_and_its_caller_hears_that_the_engine_ends(self, hand_over, kind):
        def interrupted(engine):
            raise kind("now")

        future, behind = hand_over.call(interrupted), hand_over.call(lambda engine: 7)
        with pytest.raises(kind):
            turn(hand_over)

        assert isinstance(future.exception(0), EngineDeadError)
        assert isinstance(future.exception(0).__cause__, kind)
        assert not behind.done() and hand_over.waits


class TestACancelledCall:
    def test_is_never_run_and_others_are(self, hand_over):
        seen = []
        futures = [hand_over.call(lambda engine, i=i: seen.append(i)) for i in range(3)]

        assert futures[1].cancel()
        turn(hand_over)

        assert seen == [0, 2]
        assert futures[2].done()

    def test_comes_too_late_when_it_runs(self, hand_over):
        futures = []
        futures.append(hand_over.call(lambda engine: futures[0].cancel()))

        turn(hand_over)

        assert futures[0].result(0) is False


class TestTheEnd:
    def test_answers_who_waits_and_who_comes_later(self, hand_over):
        waiting = [hand_over.call(lambda engine: 7) for _ in range(3)]

        hand_over.end(GONE)
        later = hand_over.call(lambda engine: 7)

        assert [future.exception(0) for future in [*waiting, later]] == [GONE] * 4
        assert hand_over.error is GONE and not hand_over.waits

    def test_passes_over_who_was_cancelled(self, hand_over):
        first, second = hand_over.call(lambda engine: 7), hand_over.call(lambda engine: 7)
        first.cancel()

        hand_over.end(GONE)

        assert second.exception(0) is GONE
        with pytest.raises(CancelledError):
            first.result(0)

    def test_passes_over_who_cancels_just_after_the_look(self, hand_over):
        """Its caller has another thread: whoever looks and then answers may find it cancelled in between."""

        class CancelledAfterALook(Future):
            def cancelled(self):
                before = super().cancelled()
                self.cancel()
                return before

            def done(self):
                before = super().done()
                self.cancel()
                return before

        first = CancelledAfterALook()
        hand_over._calls.put((lambda engine: 7, first))
        second = hand_over.call(lambda engine: 7)

        hand_over.end(GONE)

        assert second.exception(0) is GONE
        assert hand_over.call(lambda engine: 7).exception(0) is GONE

    def test_between_a_callers_two_lines_leaves_no_call_behind(self, hand_over):
        """The thread looks for the last time, and only then is the call there."""

        class Late(queue.SimpleQueue):
            def put(self, item):
                hand_over.end(GONE)
                super().put(item)

        hand_over._calls = Late()

        future = hand_over.call(lambda engine: 7)

        assert future.exception(0) is GONE

    def test_is_known_before_the_first_is_told(self, hand_over):
        """Whoever hears of it may call again at once."""
        again = []
        first = hand_over.call(lambda engine: 7)
        first.add_done_callback(lambda _: again.append(hand_over.call(lambda engine: 7)))

        hand_over.end(GONE)

        assert first.exception(0) is GONE
        assert again[0].exception(0) is GONE
