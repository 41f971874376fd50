"""One request's outputs on their way to a consumer who may be slow (lab 9.2). The oracle is a list of what was put."""

import asyncio
import threading
import time

import pytest

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import EngineDeadError
from minivllm.serving.streams import Stream, merged, wake
from tests.worlds import virtual_time

pytestmark = pytest.mark.lab("9.2")

SOON = 60  # seconds, until what must come is given up; of virtual time where there are no threads


def joined(earlier, later):
    return earlier + later


def in_a_loop(test):
    """Run a coroutine function of a stream of lists."""

    async def main():
        await test(Stream(asyncio.get_running_loop(), joined))

    virtual_time.run(main(), 2 * SOON)


async def taken(stream):
    return await asyncio.wait_for(stream.take(), SOON)


def put(stream, item):
    """As the engine's thread does it."""
    if stream.put(item):
        wake([stream])


class TestTake:
    def test_gives_what_came_as_one_item_in_its_order(self):
        async def test(stream):
            for i in range(4):
                put(stream, [i])

            assert await taken(stream) == [0, 1, 2, 3]

        in_a_loop(test)

    def test_gives_nothing_twice(self):
        async def test(stream):
            found = []
            for i in range(3):
                put(stream, [i])
                found.append(await taken(stream))

            assert found == [[0], [1], [2]]

        in_a_loop(test)

    def test_waits_for_something_new(self):
        async def test(stream):
            put(stream, [0])
            await taken(stream)
            waits = asyncio.ensure_future(stream.take())
            await asyncio.sleep(0.01)
            assert not waits.done()

            put(stream, [1])

            assert await asyncio.wait_for(waits, SOON) == [1]

        in_a_loop(test)

    def test_has_also_items_that_come_between_the_wake_and_the_take(self):
        """The consumer is woken, and it is not his turn yet."""

        async def test(stream):
            waits = asyncio.ensure_future(stream.take())
            await asyncio.sleep(0)
            put(stream, [0])
            await asyncio.sleep(0)
            put(stream, [1])

            assert await asyncio.wait_for(waits, SOON) == [0, 1]

        in_a_loop(test)

    def test_raises_what_was_put_in_an_items_place(self):
        async def test(stream):
            put(stream, [0])
            assert await taken(stream) == [0]
            put(stream, EngineDeadError("it has ended"))

            with pytest.raises(EngineDeadError, match="it has ended"):
                await taken(stream)

        in_a_loop(test)

    def test_raises_an_error_that_comes_behind_an_item(self):
        async def test(stream):
            put(stream, [0])
            put(stream, EngineDeadError("it has ended"))

            with pytest.raises(EngineDeadError):
                await taken(stream)
            assert stream.last == [0]

        in_a_loop(test)


class TestPut:
    def test_wakes_a_consumer_once_until_he_has_taken(self):
        async def test(stream):
            wakes = [stream.put([i]) for i in range(3)]
            wake([stream])
            await taken(stream)

            assert wakes == [True, False, False]
            assert stream.put([3])

        in_a_loop(test)

    def test_of_an_error_wakes_as_well(self):
        async def test(stream):
            assert stream.put(ValueError("no")) is True

        in_a_loop(test)

    def test_of_an_error_wakes_a_consumer_of_final_outputs(self):
        async def main():
            stream = Stream(asyncio.get_running_loop(), joined, is_due=lambda item: False)

            assert stream.put([0]) is False
            assert stream.put(ValueError("no")) is True

        asyncio.run(main())

    def test_wakes_for_what_is_due_and_the_rest_is_there_too(self):
        async def main():
            stream = Stream(asyncio.get_running_loop(), joined, is_due=lambda item: item == ["end"])

            assert [stream.put([i]) for i in range(3)] == [False] * 3
            assert stream.put(["end"]) is True
            assert stream.put(["more"]) is False
            wake([stream])
            assert await taken(stream) == [0, 1, 2, "end", "more"]

        asyncio.run(main())

    def test_keeps_the_newest_item_unmerged(self):
        async def test(stream):
            put(stream, [0])
            put(stream, [1])
            assert stream.last == [1]

            await taken(stream)

            assert stream.last == [1]

        in_a_loop(test)

    def test_says_every_time_that_the_loop_is_closed(self):
        loop = asyncio.new_event_loop()
        stream = Stream(loop, joined)
        loop.close()

        assert [stream.put([i]) for i in range(2)] == [True, True]
        assert wake([stream]) == [stream]

    @pytest.mark.parametrize("pause", [0, 0.002])
    def test_from_another_thread_loses_nothing_and_keeps_one_item(self, pause):
        """A consumer who sleeps gets few items, and all that was in them."""

        async def test(stream):
            def engine():
                for i in range(300):
                    put(stream, [i])
                    if i % 10 == 0:
                        time.sleep(0.0005)

            found = []
            thread = threading.Thread(target=engine, daemon=True)
            thread.start()
            while len(found) < 300:
                found += await taken(stream)
                await asyncio.sleep(pause)

            thread.join(SOON)
            assert found == list(range(300))

        in_a_loop(test)


def output(*deltas, finished=False, prompt="p"):
    """An output of as many answers; each is (text so far, delta, ids of the delta)."""
    answers = [
        CompletionOutput(i, text, list(range(len(text))), delta_text=delta, delta_token_ids=ids)
        for i, (text, delta, ids) in enumerate(deltas)
    ]
    return RequestOutput("r", prompt, [1, 2], answers, finished=finished)


class TestTwoOutputs:
    def test_as_one_have_the_deltas_of_both_in_order(self):
        earlier = output(("ab", "ab", [5, 6]), ("x", "x", [7]))
        later = output(("abc", "c", [8]), ("xyz", "yz", [9, 10]), finished=True)

        both = merged(earlier, later)

        assert [(a.delta_text, a.delta_token_ids) for a in both.outputs] == [
            ("abc", [5, 6, 8]),
            ("xyz", [7, 9, 10]),
        ]

    def test_as_one_are_the_later_one_in_all_else(self):
        earlier = output(("ab", "ab", [5, 6]))
        later = output(("abc", "c", [8]), finished=True)
        later.outputs[0].finish_reason = "stop"

        both = merged(earlier, later)

        assert both.finished and both.outputs[0].finish_reason == "stop"
        assert (both.outputs[0].text, both.outputs[0].token_ids) == ("abc", [0, 1, 2])

    def test_stay_as_they_were(self):
        """The engine goes on with them."""
        earlier, later = output(("ab", "ab", [5, 6])), output(("abc", "c", [8]))

        merged(earlier, later)

        assert earlier == output(("ab", "ab", [5, 6]))
        assert later == output(("abc", "c", [8]))

    def test_can_be_merged_with_a_third(self):
        parts = [output(("a", "a", [1])), output(("ab", "b", [2])), output(("abc", "c", [3]))]

        both = merged(merged(parts[0], parts[1]), parts[2])

        assert (both.outputs[0].delta_text, both.outputs[0].delta_token_ids) == ("abc", [1, 2, 3])
