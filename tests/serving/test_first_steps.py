"""Which requests the first step of an idle engine has: on a GPU also those right behind the first one."""

import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.serving import engine_thread
from minivllm.serving.client import EngineCoreRequest
from minivllm.serving.engine_thread import EngineThread
from minivllm.serving.streams import output_stream
from tests.worlds.engines import greedy

PROMPT = [5, 6, 7, 8, 9]


class SomeEventLoop:
    def is_closed(self):
        return False

    def call_soon_threadsafe(self, function, *args):
        pass


class Clock:
    """Time that passes only while somebody sleeps; meanwhile `coming` others arrive, one at a time.

    sleeps   how often somebody slept
    """

    def __init__(self, loop, coming):
        self.loop, self.coming, self.now, self.sleeps = loop, coming, 0.0, 0

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
    def make(on_gpu=True, coming=0, **options):
        engine = world.engine(**{"max_num_seqs": 64, **options})
        engine.runner.on_gpu = on_gpu
        loop = EngineThread(engine, start=False)
        clock = Clock(loop, coming)
        monkeypatch.setattr(engine_thread, "time", clock)
        return loop, clock

    return make


def begin(loop, request_id, max_tokens=3):
    request = EngineCoreRequest(request_id, PROMPT, greedy(max_tokens))
    loop.begin(output_stream(SomeEventLoop(), "delta"), request)


def rows(loop):
    return [len(record.rows) for record in loop.engine.trace.records]


def test_it_takes_those_that_come_before_a_moment_without_any(make):
    loop, clock = make(coming=3)
    begin(loop, "first")

    loop.run_once()

    assert rows(loop) == [4]
    assert clock.sleeps == 4


def test_on_a_cpu_it_waits_for_no_other_request(make):
    loop, clock = make(on_gpu=False, coming=3)
    begin(loop, "first")

    loop.run_once()

    assert rows(loop) == [1]
    assert clock.sleeps == 0


def test_it_does_not_wait_for_more_than_a_step_takes(make):
    loop, clock = make(coming=30, max_num_batched_tokens=3 * len(PROMPT))
    begin(loop, "first")

    loop.run_once()

    assert rows(loop) == [3]
    assert clock.sleeps == 2


def test_it_does_not_wait_for_ever_while_others_come(make):
    loop, clock = make(coming=1000)
    begin(loop, "first")

    loop.run_once()

    assert 1 < rows(loop)[0] < 30
    assert clock.now == pytest.approx(engine_thread.SECONDS_FOR_ALL, rel=0.2)


def test_a_later_step_waits_for_no_other_request(make):
    loop, clock = make()
    begin(loop, "first")
    loop.run_once()
    before, clock.coming = clock.sleeps, 3

    loop.run_once()

    assert clock.sleeps == before
    assert rows(loop) == [1, 1]


def test_after_a_request_that_is_refused_it_waits_for_no_other(make):
    loop, clock = make(coming=3)
    loop.begin(output_stream(SomeEventLoop(), "delta"), EngineCoreRequest("wrong", [], SamplingParams()))

    loop.run_once()

    assert (clock.sleeps, rows(loop)) == (0, [])
