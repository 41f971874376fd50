"""A client that leaves aborts its request (lab 9.3). The oracle is a list of the calls that the engine got."""

import asyncio
import gc
import time
from concurrent.futures import Future
from contextlib import suppress

import pytest

from minivllm import AsyncLLM, SamplingParams
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import EngineDeadError
from minivllm.serving.cancellation import listen, unless_gone
from minivllm.serving.client import EngineClient
from minivllm.serving.streams import output_stream, wake
from tests.worlds import virtual_time
from tests.worlds.small import SmallWorld
from tests.worlds.waiting import PATIENCE

pytestmark = pytest.mark.lab("9.3")

SOON = 60  # seconds, until what must come is given up; of virtual time


def run(coroutine):
    return virtual_time.run(coroutine, 2 * SOON)


def run_beside_an_engine(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


class FakeClient(EngineClient):
    """An engine that never answers, so its futures are never filled.   calls: those that it got"""

    config = tokenizer = error = None
    adapter_names, clock = (), time.monotonic

    def __init__(self):
        self.calls = []

    def abort(self, request_ids, sink=None):
        self.calls.append((list(request_ids), sink))
        return Future()

    def call(self, function, *args):
        return Future()

    def begin(self, sink, request):
        self.calls.append(("begin", request.request_id))

    def read_ahead(self, lora_request):
        return Future()

    def subscribe(self, events, listener):
        return Future()

    def unsubscribe(self, listener):
        return Future()


def output(text, finished=False):
    return RequestOutput("r", None, [1], [CompletionOutput(0, text, [7] * len(text))], finished=finished)


def new_stream():
    return output_stream(asyncio.get_running_loop(), "cumulative")


def put(stream, item):
    if stream.put(item):
        wake([stream])


async def nothing():
    pass


class TestAConsumer:
    def test_gets_the_outputs_up_to_the_last_and_aborts_nothing(self):
        async def main():
            client, stream, found = FakeClient(), new_stream(), []
            put(stream, output("a"))
            async for item in listen(client, stream, "r", nothing):
                found.append(item.outputs[0].text)
                if len(found) < 4:
                    put(stream, output("a" * (len(found) + 1), finished=len(found) == 3))
            return found, client.calls

        assert run(main()) == (["a", "aa", "aaa", "aaaa"], [])

    def test_has_its_request_begun_before_anything_comes(self):
        async def main():
            stream = new_stream()

            async def begin():
                put(stream, output("a", finished=True))

            return [item async for item in listen(FakeClient(), stream, "r", begin)]

        assert [item.outputs[0].text for item in run(main())] == ["a"]

    def test_gets_the_error_if_its_request_could_not_begin(self):
        async def main():
            async def begin():
                raise ValueError("max_tokens must be at least 1")

            return [item async for item in listen(FakeClient(), new_stream(), "r", begin)]

        with pytest.raises(ValueError, match="max_tokens"):
            run(main())

    def test_gets_an_error_if_the_engine_ends(self):
        async def main():
            stream = new_stream()
            put(stream, EngineDeadError("it has ended"))
            return [item async for item in listen(FakeClient(), stream, "r", nothing)]

        with pytest.raises(EngineDeadError, match="it has ended"):
            run(main())


async def leave(how, outputs, stream):
    """Stop after the first output, in one of several ways."""
    if how == "closed":
        await anext(outputs)
        await outputs.aclose()
    elif how == "cancelled":

        async def consume():
            async for _ in outputs:
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    elif how == "raised":
        with pytest.raises(KeyError):
            async for _ in outputs:
                raise KeyError
        await outputs.aclose()


class TestAConsumerThatLeaves:
    @pytest.mark.parametrize("how", ["closed", "cancelled", "raised"])
    def test_aborts_the_request_of_this_stream_once(self, how):
        async def main():
            client, stream = FakeClient(), new_stream()
            put(stream, output("a"))
            await leave(how, listen(client, stream, "r7", nothing), stream)
            return client.calls, [(["r7"], stream)]

        calls, expected = run(main())
        assert calls == expected

    def test_without_closing_the_generator_aborts_the_request_too(self):
        async def main():
            client, stream = FakeClient(), new_stream()
            put(stream, output("a"))
            outputs = listen(client, stream, "r7", nothing)
            await anext(outputs)
            del outputs
            gc.collect()
            await asyncio.sleep(0.01)
            return [ids for ids, _ in client.calls]

        assert run(main()) == [["r7"]]

    def test_while_the_request_begins_aborts_it(self):
        """It may be in the engine by then."""

        async def main():
            client = FakeClient()
            first = asyncio.ensure_future(
                anext(listen(client, new_stream(), "r7", lambda: asyncio.sleep(3 * SOON)))
            )
            await asyncio.sleep(0.01)
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
            return [ids for ids, _ in client.calls]

        assert run(main()) == [["r7"]]

    def test_after_the_last_output_aborts_nothing(self):
        async def main():
            client, stream = FakeClient(), new_stream()
            put(stream, output("a", finished=True))
            outputs = listen(client, stream, "r7", nothing)
            await anext(outputs)
            await outputs.aclose()
            return client.calls

        assert run(main()) == []


@pytest.fixture
def llm(tmp_path):
    world = SmallWorld(tmp_path)
    llm = AsyncLLM.from_engine(world.engine())
    llm.world = world
    yield llm
    llm.shutdown()


LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


def left(engine):
    pool = engine.scheduler.kv_cache.block_pool
    return list(engine.scheduler.requests), sum(pool.ref_cnt)


def test_nothing_of_aborted_requests_stays_in_the_engine(llm):
    async def main():
        tasks = []
        for i in range(6):
            outputs = llm.generate([5, 6, 7], LONG, f"r{i}", llm.world.request(i % 3))
            await anext(outputs)
            tasks.append(outputs)
        before = await llm.call(left)
        for outputs in tasks:
            await outputs.aclose()
        return before, await llm.call(left)

    before, after = run_beside_an_engine(main())
    assert len(before[0]) == 6 and before[1] > 0
    assert after == ([], 0)


def test_a_request_that_was_refused_for_its_id_does_not_abort_the_owner(llm):
    async def main():
        first = llm.generate([5, 6, 7], LONG, "same")
        await anext(first)
        with pytest.raises(ValueError, match="in use"):
            await anext(llm.generate([5, 6, 7], LONG, "same"))
        return [output async for output in first][-1]

    last = run_beside_an_engine(main())
    assert last.outputs[0].finish_reason == "length"
    assert len(last.outputs[0].token_ids) == 90


class Connection:
    """ASGI's `receive` of a connection that is open until it is closed."""

    def __init__(self, *messages):
        self.messages = list(messages)
        self.closed = asyncio.Event()
        self.num_waiting = 0

    async def receive(self):
        if self.messages:
            return self.messages.pop(0)
        self.num_waiting += 1
        try:
            await self.closed.wait()
        finally:
            await asyncio.sleep(0.01)  # it takes a moment to end
            self.num_waiting -= 1
        return {"type": "http.disconnect"}


class Work:
    """Something that takes as long as it is let, and is done a moment after it was cancelled."""

    def __init__(self):
        self.go = asyncio.Event()
        self.state = "new"

    async def run(self):
        self.state = "running"
        try:
            await self.go.wait()
            self.state = "done"
            return "the answer"
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.state = "cancelled"
            raise


class TestAConnection:
    def test_that_stays_open_gets_the_answer(self):
        async def main():
            connection, work = Connection(), Work()
            work.go.set()
            answer = await unless_gone(connection.receive, work.run())
            return answer, connection.num_waiting

        answer, num_waiting = run(main())
        assert answer == "the answer"
        assert num_waiting == 0, "the answer is there, and `receive` is still waited for"

    def test_that_stays_open_gets_the_error(self):
        async def fail():
            raise ValueError("unknown model")

        async def main():
            return await unless_gone(Connection().receive, fail())

        with pytest.raises(ValueError, match="unknown model"):
            run(main())

    def test_that_is_closed_cancels_the_work(self):
        async def main():
            connection, work = Connection(), Work()
            waits = asyncio.ensure_future(unless_gone(connection.receive, work.run()))
            await asyncio.sleep(0.01)
            assert work.state == "running"
            connection.closed.set()
            return await asyncio.wait_for(waits, SOON), work.state

        answer, state = run(main())
        assert answer is None
        assert state == "cancelled", f"the connection was closed, and its work is {state}"

    def test_that_says_something_else_is_still_open(self):
        async def main():
            connection, work = Connection({"type": "http.request"}, {"type": "http.request"}), Work()
            waits = asyncio.ensure_future(unless_gone(connection.receive, work.run()))
            await asyncio.sleep(0.01)
            assert not waits.done()
            work.go.set()
            return await asyncio.wait_for(waits, SOON)

        assert run(main()) == "the answer"

    def test_whose_handler_is_cancelled_leaves_nothing_running(self):
        async def main():
            connection, work = Connection(), Work()
            waits = asyncio.ensure_future(unless_gone(connection.receive, work.run()))
            await asyncio.sleep(0.01)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            return work.state, connection.num_waiting

        state, num_waiting = run(main())
        assert state == "cancelled", f"the handler was cancelled, and its work is {state}"
        assert num_waiting == 0, "the handler was cancelled, and `receive` is still waited for"

    def test_closed_too_late_still_gets_the_answer(self):
        """Both at once: the work is done, so nothing is thrown away."""

        async def main():
            connection, work = Connection(), Work()
            waits = asyncio.ensure_future(unless_gone(connection.receive, work.run()))
            await asyncio.sleep(0.01)
            work.go.set()
            connection.closed.set()
            return await waits

        assert run(main()) == "the answer"

    def test_that_is_closed_leaves_the_handlers_task_uncancelled(self):
        async def main():
            connection = Connection()
            connection.closed.set()
            answer = await unless_gone(connection.receive, Work().run())
            return answer, asyncio.current_task().cancelling()

        answer, cancelling = run(main())
        assert answer is None
        assert cancelling == 0, "the handler's own task was cancelled, and not the work alone"

    @pytest.mark.parametrize("iterations", range(8))
    def test_that_is_closed_while_the_handler_is_cancelled_hides_nothing(self, iterations):
        """So many iterations of the loop lie between the two; the handler may have ended by then."""

        async def main():
            closed = asyncio.Event()

            async def receive():
                await closed.wait()
                return {"type": "http.disconnect"}

            waits = asyncio.ensure_future(unless_gone(receive, Work().run()))
            await asyncio.sleep(0.01)
            closed.set()
            for _ in range(iterations):
                await asyncio.sleep(0)
            is_cancelled = waits.cancel()
            [ended] = await asyncio.gather(waits, return_exceptions=True)
            return is_cancelled, ended

        is_cancelled, ended = run(main())
        assert isinstance(ended, asyncio.CancelledError) if is_cancelled else ended is None
