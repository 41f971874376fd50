"""Mixes where an engine is not alone: beside steps, in another process, on several ranks, in pages of a GPU's slots."""

import asyncio

import pytest
from mixed_world import RANK, mixed_world

from minivllm import LoRARequest
from minivllm.config import PAGE_RANKS
from minivllm.mixes import mix
from minivllm.serving.async_llm import AsyncLLM
from tests.worlds.engines import engine_process, greedy, make_engine, run, tokens_of
from tests.worlds.ranks import engines_in_lockstep

PROMPT = [5, 17, 40, 8, 22, 9, 31, 12, 44]
MIXES = [(("qv", 0.7), ("all", 0.3)), (("mlp", -0.5), ("patterns", 1.25)), (("all", 0.2),)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return mixed_world(tmp_path_factory)


def request(world, weights):
    return mix([(world.request(name), weight) for name, weight in weights])


def expected(world, weights, tokens=5):
    return world.oracle().greedy(world.mixed_in_peft(weights), PROMPT, tokens)


def serve(engine, world):
    for number, weights in enumerate(MIXES):
        engine.add_request(str(number), PROMPT, greedy(5), lora_request=request(world, weights))
    outputs = run(engine)
    return [tokens_of(outputs[str(number)]) for number in range(len(MIXES))]


def make_it(base):
    return make_engine(base, None, {"max_lora_rank": RANK})


@pytest.mark.parametrize("in_a_process", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_are_read_beside_steps_and_follow_their_parts(world, in_a_process):
    async def ask(llm, lora_request, request_id):
        async for output in llm.generate(PROMPT, greedy(5), request_id, lora_request, output_kind="final"):
            last = output
        return tokens_of(last)

    async def talk(llm):
        asked = [ask(llm, request(world, weights), str(n)) for n, weights in enumerate(MIXES)]
        assert await asyncio.gather(*asked) == [expected(world, weights) for weights in MIXES]

        assert await llm.add_lora(world.request("qv"))
        named = mix([("qv", 0.7), (world.request("all"), 0.3)])
        assert await llm.add_lora(named)
        assert await ask(llm, named, "named") == expected(world, MIXES[0])
        again = LoRARequest("qv", 1, str(world.path("qv-again")), load_inplace=True)
        assert await llm.add_lora(again)
        assert await ask(llm, named, "again") == expected(world, (("qv-again", 0.7), ("all", 0.3)))
        assert await llm.remove_lora(1)
        with pytest.raises(ValueError, match="adapter 'qv' of a mix is unknown"):
            await ask(llm, named, "gone")

    llm = (
        AsyncLLM(engine_process(make_it, world.base))
        if in_a_process
        else AsyncLLM.from_engine(make_it(world.base))
    )
    try:
        asyncio.run(talk(llm))
    finally:
        llm.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["triton", "paged"])
def test_kernels_serve_them(world, backend):
    engine = world.engine(max_loras=3, punica_backend=backend, dtype="float32")

    assert serve(engine, world) == [expected(world, weights) for weights in MIXES]
    if backend == "paged":  # as many pages as an adapter of rank 4 + 8 has, of rank 3 + 12 and of rank 8
        held = engine.adapters.manager.punica_wrapper.pool.ledger.held
        assert sorted(map(len, held.values())) == sorted(-(-rank // PAGE_RANKS) for rank in (12, 15, 8))


def test_two_ranks_have_each_their_share(world, monkeypatch):
    answers = engines_in_lockstep(monkeypatch, 2, lambda tp: serve(world.engine(max_loras=3), world))

    assert answers == [[expected(world, weights) for weights in MIXES]] * 2


def test_ranks_that_share_out_ranks_refuse_them(world, monkeypatch):
    def refused(tp):
        with pytest.raises(ValueError, match="mixes are not served with fully_sharded_loras"):
            serve(world.engine(fully_sharded_loras=True), world)

    engines_in_lockstep(monkeypatch, 2, refused)
