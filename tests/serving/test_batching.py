"""The work of one iteration of an event loop goes to another thread or process together, and fails apart."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from minivllm import AsyncLLM
from minivllm.serving import engine_process
from minivllm.serving.batching import BatchingExecutor, call_at_end_of_iteration
from tests.worlds.engines import greedy, tokens_of
from tests.worlds.models import character_tokenizer
from tests.worlds.waiting import PATIENCE, some_turns


class Noting(ThreadPoolExecutor):
    """Counts calls."""

    def __init__(self):
        super().__init__(1)
        self.count = 0

    def submit(self, *call):
        self.count += 1
        return super().submit(*call)


@pytest.fixture
def thread():
    with Noting() as executor:
        yield executor


def raising(error):
    raise error


def test_functions_of_one_iteration_are_one_call_and_each_gets_its_own_result(thread):
    executor = BatchingExecutor(thread)

    async def ask(number):
        return await executor.run(lambda: number * number)

    async def ask_all():
        return await asyncio.gather(*map(ask, range(20)))

    assert asyncio.run(ask_all()) == [n * n for n in range(20)]
    assert thread.count == 1


def test_what_one_function_raises_is_its_own(thread):
    executor = BatchingExecutor(thread)

    async def ask_all():
        functions = [
            lambda: "first",
            lambda: raising(ValueError("bad")),
            lambda: raising(StopIteration("odd")),
            lambda: "last",
        ]
        return await asyncio.gather(*map(executor.run, functions), return_exceptions=True)

    first, bad, odd, last = asyncio.run(ask_all())

    assert (first, last) == ("first", "last")
    assert isinstance(bad, ValueError) and str(bad) == "bad"
    assert isinstance(odd, RuntimeError) and "odd" in str(odd)


def test_a_function_that_is_cancelled_does_not_cancel_the_others(thread):
    executor, may_go_on = BatchingExecutor(thread), threading.Event()

    async def ask_all():
        held, other = executor.run(may_go_on.wait), executor.run(lambda: "other")
        await some_turns()
        held.cancel()
        may_go_on.set()
        return await asyncio.wait_for(other, PATIENCE)

    assert asyncio.run(ask_all()) == "other"


def test_an_executor_that_was_shut_down_refuses_all(thread):
    executor = BatchingExecutor(thread)
    thread.shutdown()

    async def ask_all():
        each = [executor.run(lambda: "never") for _ in range(2)]
        return await asyncio.gather(*each, return_exceptions=True)

    assert [type(found) for found in asyncio.run(ask_all())] == [RuntimeError] * 2


def test_a_loop_that_has_gone_holds_up_no_other(thread):
    executor, may_go_on = BatchingExecutor(thread), threading.Event()

    async def leave():
        executor.run(may_go_on.wait)
        await some_turns()

    async def ask():
        return await asyncio.wait_for(executor.run(lambda: "there"), PATIENCE)

    asyncio.run(leave())
    may_go_on.set()

    assert asyncio.run(ask()) == "there"


def test_the_end_of_an_iteration_comes_after_all_that_is_ready():
    said = []

    async def talk(number):
        call_at_end_of_iteration(lambda: said.append("end"))
        said.append(number)

    async def talk_all():
        await asyncio.gather(*map(talk, range(3)))

    asyncio.run(talk_all())
    call_at_end_of_iteration(lambda: said.append("no loop"))

    assert said == [0, 1, 2, "end", "end", "end", "no loop"]


# ---- requests on their way to an engine's process -------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(world):
    llm = AsyncLLM(world.engine_process(character_tokenizer()))
    yield llm
    llm.shutdown()


@pytest.fixture
def messages(monkeypatch):
    """The names of the orders in each message that is sent."""
    noted, send = [], engine_process.send

    def note(pipe, message):
        noted.append([name for _, name, _ in message])
        send(pipe, message)

    monkeypatch.setattr(engine_process, "send", note)
    return noted


async def answer(llm, request_id, prompt, max_tokens=4):
    async for output in llm.generate(prompt, greedy(max_tokens), request_id):
        last = output
    return tokens_of(last)


def test_requests_of_one_iteration_are_one_message(world, llm, messages):
    prompts = [[5 + n, 6, 7] for n in range(6)]

    async def ask_all():
        return await asyncio.gather(*(answer(llm, f"t{n}", prompt) for n, prompt in enumerate(prompts)))

    answers = asyncio.run(ask_all())

    assert answers == [world.oracle().greedy(None, prompt, 4) for prompt in prompts]
    assert messages == [["begin"] * 6]


def test_a_call_of_the_same_iteration_is_sent_at_once_and_after_them(llm, messages):
    async def ask():
        asked = asyncio.ensure_future(answer(llm, "left", [5, 6, 7], max_tokens=40))
        await asyncio.sleep(0)
        await llm.abort("left")
        await asked

    asyncio.run(ask())

    assert messages == [["begin", "abort"]]


def test_requests_that_are_aborted_at_once_leave_nothing(llm, messages):
    async def leave():
        asked = asyncio.ensure_future(answer(llm, "gone", [5, 6, 7], max_tokens=40))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave())

    assert [name for names in messages for name in names] == ["begin", "abort"]
    assert asyncio.run(answer(llm, "gone", [5, 6, 7])) is not None
    assert not llm._client._requests and not llm._client._begun
