"""When consumers of a GPU's engine are woken: while it computes the next step, if there is one."""

import pytest

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


def make_loop(world, on_gpu):
    engine = world.engine()
    engine.runner.on_gpu = on_gpu
    return EngineThread(engine, start=False)


def begin(loop, events, request_id="one", max_tokens=3):
    stream = output_stream(events, "delta")
    loop.begin(stream, EngineCoreRequest(request_id, PROMPT, greedy(max_tokens)))
    return stream


def fail(*args):
    raise RuntimeError("out of luck")


def test_a_cpu_has_them_woken_after_each_step(world):
    loop, events = make_loop(world, on_gpu=False), SomeEventLoop()
    begin(loop, events)

    loop.run_once()

    assert len(events.calls) == 1


def test_a_gpu_has_them_woken_when_the_next_step_is_launched(world):
    loop, events, woken = make_loop(world, on_gpu=True), SomeEventLoop(), []
    loop.engine.listeners.append(lambda scheduled: woken.append(len(events.calls)))
    begin(loop, events)

    loop.run_once()
    after_the_first = len(events.calls)
    loop.run_once()

    assert after_the_first == 0
    assert woken == [0, 1]


def test_the_last_output_waits_for_no_step(world):
    loop, events = make_loop(world, on_gpu=True), SomeEventLoop()
    begin(loop, events, max_tokens=1)

    loop.run_once()

    assert len(events.calls) == 1


def test_no_output_waits_for_a_call_that_delays_the_steps(world):
    loop, events, woken = make_loop(world, on_gpu=True), SomeEventLoop(), []
    begin(loop, events)

    loop.run_once()
    loop.call(lambda engine: woken.append(len(events.calls)))
    loop.run_once()

    assert woken == [1]


def test_no_output_waits_for_a_step_that_fails(world, monkeypatch):
    loop, events = make_loop(world, on_gpu=True), SomeEventLoop()
    begin(loop, events)
    loop.run_once()
    monkeypatch.setattr(loop.engine.scheduler, "schedule", fail)

    with pytest.raises(RuntimeError, match="out of luck") as raised:
        loop.run_once()
    loop._end(raised.value)  # as the thread does

    assert len(events.calls) == 1


def test_requests_of_an_event_loop_that_is_closed_end_alone(world):
    loop, events, gone = make_loop(world, on_gpu=True), SomeEventLoop(), SomeEventLoop()
    begin(loop, events, "stays", max_tokens=4)
    begin(loop, gone, "goes", max_tokens=4)
    loop.run_once()
    gone.closed = True

    loop.run_once()

    assert set(loop.sinks) == {"stays"}
    assert not loop.engine.knows("goes")
