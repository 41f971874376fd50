"""The engine's loop, run by hand: whom the first step of an idle engine has, and when consumers are woken.

On a GPU the first step waits a moment for those right behind the first request, and consumers are woken while the next
step is computed. A CPU does neither.
"""

import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.serving import engine_thread
from minivllm.serving.client import EngineCoreRequest
from minivllm.serving.engine_thread import EngineThread
from minivllm.serving.streams import output_stream
from tests.worlds.engines import greedy

PROMPT = [5, 6, 7, 8, 9]


class SomeEventLoop:
    """Stands in for an event loop: keeps what it is told to call."""

    def __init__(self):
        self.calls, self.closed = [], False

    def is_closed(self):
        return self.closed

    def call_soon_threadsafe(self, function, *args):
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(function)


class Clock:
    """Time that passes only while somebody sleeps; meanwhile `coming` others arrive, one at a time.

    sleeps   how often somebody slept
    """

    def __init__(self, loop):
        self.loop, self.coming, self.now, self.sleeps = loop, 0, 0.0, 0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.sleeps += 1
        if self.coming:
            self.coming -= 1
            begin(self.loop, f"behind-{self.sleeps}")


@pytest.fixture
def make(world, monkeypatch):
    """The loop of an engine, and its clock."""

    def make(on_gpu=True, **options):
        engine = world.engine(**{"max_num_seqs": 64, **options})
        engine.runner.on_gpu = on_gpu
        loop = EngineThread(engine, start=False)
        clock = Clock(loop)
        monkeypatch.setattr(engine_thread, "time", clock)
        return loop, clock

    return make


def begin(loop, request_id="first", events=None, prompt=PROMPT, params=None):
    """A request; what wakes its consumer is noted by its event loop."""
    events = events or SomeEventLoop()
    request = EngineCoreRequest(request_id, prompt, params or greedy(3))
    loop.begin(output_stream(events, "delta"), request)
    return events


def rows(loop):
    return [len(record.rows) for record in loop.engine.trace.records]


class TestTheFirstStep:
    @pytest.mark.parametrize(
        ("options", "coming", "num_rows", "sleeps"),
        [
            ({}, 3, 4, 4),
            ({"on_gpu": False}, 3, 1, 0),
            ({"max_num_batched_tokens": 3 * len(PROMPT)}, 30, 3, 2),
        ],
        ids=["a moment without any ends it", "a CPU waits for no other", "a full step ends it"],
    )
    def test_takes_those_that_come_right_behind_the_first(self, make, options, coming, num_rows, sleeps):
        loop, clock = make(**options)
        clock.coming = coming
        begin(loop)

        loop.run_once()

        assert (rows(loop), clock.sleeps) == ([num_rows], sleeps)

    def test_does_not_wait_for_ever_while_others_come(self, make):
        loop, clock = make()
        clock.coming = 1000
        begin(loop)

        loop.run_once()

        assert 1 < rows(loop)[0] < 30
        assert clock.now == pytest.approx(engine_thread.SECONDS_FOR_ALL, rel=0.2)

    def test_is_the_only_one_that_waits(self, make):
        loop, clock = make()
        begin(loop)
        loop.run_once()
        before, clock.coming = clock.sleeps, 3

        loop.run_once()

        assert clock.sleeps == before
        assert rows(loop) == [1, 1]

    def test_is_none_for_a_request_that_is_refused(self, make):
        loop, clock = make()
        clock.coming = 3
        begin(loop, prompt=[], params=SamplingParams())

        loop.run_once()

        assert (clock.sleeps, rows(loop)) == (0, [])


class TestConsumers:
    @pytest.mark.parametrize(
        ("on_gpu", "max_tokens"), [(False, 3), (True, 1)], ids=["of a CPU", "whose request has ended"]
    )
    def test_are_woken_after_the_step(self, make, on_gpu, max_tokens):
        loop, _ = make(on_gpu)
        events = begin(loop, params=greedy(max_tokens))

        loop.run_once()

        assert len(events.calls) == 1

    def test_of_a_gpu_are_woken_when_the_next_step_is_launched(self, make):
        loop, _ = make()
        events, woken = begin(loop), []
        loop.engine.listeners.append(lambda scheduled: woken.append(len(events.calls)))

        loop.run_once()
        after_the_first = len(events.calls)
        loop.run_once()

        assert after_the_first == 0
        assert woken == [0, 1]

    def test_do_not_wait_for_a_call_that_delays_the_steps(self, make):
        loop, _ = make()
        events, woken = begin(loop), []

        loop.run_once()
        loop.call(lambda engine: woken.append(len(events.calls)))
        loop.run_once()

        assert woken == [1]

    def test_do_not_wait_for_a_step_that_fails(self, make, monkeypatch):
        loop, _ = make()
        events = begin(loop)
        loop.run_once()
        monkeypatch.setattr(loop.engine.scheduler, "schedule", lambda: 1 / 0)

        with pytest.raises(ZeroDivisionError) as raised:
            loop.run_once()
        loop._end(raised.value)  # as the thread does

        assert len(events.calls) == 1

    def test_whose_event_loop_is_closed_end_alone(self, make):
        loop, _ = make()
        begin(loop, "stays", params=greedy(4))
        gone = begin(loop, "goes", params=greedy(4))
        loop.run_once()
        gone.closed = True

        loop.run_once()

        assert set(loop.sinks) == {"stays"}
        assert not loop.engine.knows("goes")
