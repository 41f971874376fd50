"""Calls from any thread, run in the engine's (lab 9.1). The oracle is a list of what was called."""

import queue
import threading
from concurrent.futures import CancelledError, Future

import pytest

from labs.kit.overlay import Todo
from minivllm.errors import EngineDeadError
from minivllm.serving.call_queue import CallQueue
from tests.worlds.waiting import ends

pytestmark = pytest.mark.lab("9.1")

GONE = EngineDeadError("it has ended")


@pytest.fixture
def call_queue():
    return CallQueue()


def in_a_thread(function):
    """A daemon: one that is never called must not keep the tests from ending."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def turn(call_queue, engine=None, wait=False):
    """Run the calls there are, in a thread, which must come back; what it raises is raised here. Returns its id."""
    raised = []

    def run():
        try:
            call_queue.run(engine, wait=wait)
        except BaseException as error:
            raised.append(error)

    thread = in_a_thread(run)
    assert ends(thread), "the engine's thread waits for a call that nobody makes"
    if raised:
        raise raised[0]
    return thread.ident


class TestCalls:
    def test_wait_until_they_are_run_and_get_their_results(self, call_queue):
        futures = [call_queue.call(lambda engine, i=i: (engine, i)) for i in range(3)]
        assert not any(future.done() for future in futures)

        turn(call_queue, "the engine")

        assert [future.result(0) for future in futures] == [("the engine", i) for i in range(3)]

    def test_are_run_one_after_the_other_in_the_thread_that_has_the_engine(self, call_queue):
        seen = []
        for i in range(20):
            call_queue.call(lambda engine, i=i: seen.append((i, threading.get_ident())))

        thread_id = turn(call_queue, wait=True)

        assert seen == [(i, thread_id) for i in range(20)]

    def test_of_calls_are_run_in_the_same_run(self, call_queue):
        seen = []
        call_queue.call(lambda engine: call_queue.call(lambda engine: seen.append("inner")))

        turn(call_queue)

        assert seen == ["inner"]
        assert call_queue.is_empty

    def test_come_from_many_threads_and_each_is_run_once(self, call_queue):
        seen, enough = [], 8 * 50

        def engine_thread():
            while len(seen) < enough:
                call_queue.run(None, wait=True)

        engine = in_a_thread(engine_thread)
        callers = [
            in_a_thread(lambda k=k: [call_queue.call(lambda _, i=i: seen.append((k, i))) for i in range(50)])
            for k in range(8)
        ]

        assert ends(engine) and all(map(ends, callers))
        assert sorted(seen) == [(k, i) for k in range(8) for i in range(50)]
        assert all([i for caller, i in seen if caller == k] == list(range(50)) for k in range(8))


class TestARun:
    def test_without_calls_does_nothing(self, call_queue):
        turn(call_queue)

        assert call_queue.is_empty

    def test_waits_for_one_call_and_for_no_second(self, call_queue):
        runner = in_a_thread(lambda: call_queue.run("engine", wait=True))
        assert runner.is_alive()

        future = call_queue.call(lambda engine: engine)

        assert ends(runner)
        assert future.result(0) == "engine"


class TestAnError:
    def test_is_raised_for_its_caller_alone(self, call_queue):
        error = KeyError("no such adapter")

        def fail(engine):
            raise error

        bad, good = call_queue.call(fail), call_queue.call(lambda engine: 7)
        turn(call_queue)

        assert bad.exception(0) is error
        assert good.result(0) == 7

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Todo])
    def test_that_is_not_recoverable_is_raised_and_its_caller_gets_engine_dead_error(self, call_queue, kind):
        def interrupted(engine):
            raise kind("now")

        future, behind = call_queue.call(interrupted), call_queue.call(lambda engine: 7)
        with pytest.raises(kind):
            turn(call_queue)

        assert isinstance(future.exception(0), EngineDeadError)
        assert isinstance(future.exception(0).__cause__, kind)
        assert not behind.done() and not call_queue.is_empty


class TestACancelledCall:
    def test_is_never_run_and_others_are(self, call_queue):
        seen = []
        futures = [call_queue.call(lambda engine, i=i: seen.append(i)) for i in range(3)]

        assert futures[1].cancel()
        turn(call_queue)

        assert seen == [0, 2]
        assert futures[2].done()

    def test_comes_too_late_when_it_runs(self, call_queue):
        futures = []
        futures.append(call_queue.call(lambda engine: futures[0].cancel()))

        turn(call_queue)

        assert futures[0].result(0) is False


class TestTheEnd:
    def test_refuses_calls_that_wait_and_later_ones(self, call_queue):
        waiting = [call_queue.call(lambda engine: 7) for _ in range(3)]

        call_queue.end(GONE)
        later = call_queue.call(lambda engine: 7)

        assert [future.exception(0) for future in [*waiting, later]] == [GONE] * 4
        assert call_queue.error is GONE and call_queue.is_empty

    def test_ignores_calls_that_were_cancelled(self, call_queue):
        first, second = call_queue.call(lambda engine: 7), call_queue.call(lambda engine: 7)
        first.cancel()

        call_queue.end(GONE)

        assert second.exception(0) is GONE
        with pytest.raises(CancelledError):
            first.result(0)

    def test_ignores_a_call_that_is_cancelled_just_after_the_check(self, call_queue):
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
        call_queue._calls.put((lambda engine: 7, first))
        second = call_queue.call(lambda engine: 7)

        call_queue.end(GONE)

        assert second.exception(0) is GONE
        assert call_queue.call(lambda engine: 7).exception(0) is GONE

    def test_between_a_callers_two_lines_leaves_no_call_behind(self, call_queue):
        """The thread looks for the last time, and only then is the call there."""

        class Late(queue.SimpleQueue):
            def put(self, item):
                call_queue.end(GONE)
                super().put(item)

        call_queue._calls = Late()

        future = call_queue.call(lambda engine: 7)

        assert future.exception(0) is GONE

    def test_is_known_before_the_first_call_is_refused(self, call_queue):
        """Whoever hears of it may call again at once."""
        again = []
        first = call_queue.call(lambda engine: 7)
        first.add_done_callback(lambda _: again.append(call_queue.call(lambda engine: 7)))

        call_queue.end(GONE)

        assert first.exception(0) is GONE
        assert again[0].exception(0) is GONE
