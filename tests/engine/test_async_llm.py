"""An engine in a thread of its own, and what event loops hear of it."""

import asyncio
import threading

import pytest
from soak_checks import check_engine
from tiny_engine import greedy, tiny_world, tokens_of

from minivllm import AsyncLLM

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.fixture
def serve(world):
    """Makes AsyncLLMs of tiny engines; when the test is over nothing of it may be left in them."""
    made, before = [], threading.active_count()

    def make(max_queued=None, **options):
        tokenizer = options.pop("tokenizer", None)
        made.append(AsyncLLM.from_engine(world.engine(tokenizer, **options), max_queued=max_queued))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
        check_engine(llm.engine, [])
    assert threading.active_count() == before


async def collect(llm, request_id, params, lora=None, prompt=PROMPT, **options):
    return [o async for o in llm.generate(prompt, params, request_id, lora, **options)]


def deltas(outputs, index=0):
    return [token for output in outputs for token in output.outputs[index].delta_token_ids]


def test_requests_of_all_adapters_get_the_tokens_of_peft(world, serve):
    llm = serve()
    names = [None, *world.names]

    async def main():
        return await asyncio.gather(
            *(collect(llm, f"r{i}", greedy(6 + i), world.request(name)) for i, name in enumerate(names * 2))
        )

    for i, outputs in enumerate(asyncio.run(main())):
        expected = world.oracle().greedy(names[i % len(names)], PROMPT, 6 + i)
        assert tokens_of(outputs[-1]) == deltas(outputs) == expected
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
