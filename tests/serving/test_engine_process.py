"""An engine in a process of its own: what crosses to it and back, and what is left when one of the two ends."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import forkserver

import pytest

from minivllm import AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from minivllm.errors import EngineDeadError
from minivllm.serving.calls import step_records
from minivllm.sources.resolver import LoRAResolverRegistry
from tests.worlds.engines import OPTIONS, engine_process, greedy, tokens_of
from tests.worlds.models import character_tokenizer
from tests.worlds.processes import (
    break_steps,
    check_is_empty,
    die_while_made,
    engine_itself,
    fail_to_make,
    hold_after,
    is_there,
    process_id,
    say,
    touch,
    wait_for,
)
from tests.worlds.waiting import PATIENCE, some_turns, threads_end, until, wait_until

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def shared(world):
    llm = AsyncLLM(world.engine_process(character_tokenizer()), max_queued=20)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(world, shared):
    """An engine that many tests use; after each nothing may be left in it, and it knows no adapters."""
    yield shared
    asyncio.run(shared.call(check_is_empty))
    for name in world.names:
        asyncio.run(shared.remove_lora(world.request(name).lora_int_id))
    assert not shared._open and not shared._client._requests and not shared._client._calls


@pytest.fixture
def own(world):
    """An engine that the test ends in some way; nothing of it may be left."""
    forkserver.ensure_running()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    llm = AsyncLLM(world.engine_process())
    yield llm
    llm.shutdown()
    assert llm._client._process.returncode is not None
    threads_end(before[0])
    assert len(os.listdir("/proc/self/fd")) <= before[1]


async def collect(llm, request_id, params, lora=None, prompt=PROMPT, **options):
    return [o async for o in llm.generate(prompt, params, request_id, lora, **options)]


async def ends(coroutine, match):
    with pytest.raises(EngineDeadError, match=match):
        await asyncio.wait_for(coroutine, PATIENCE)


async def the_rest(outputs):
    async for _ in outputs:
        pass


class TestAnswers:
    @pytest.mark.parametrize("kind", ["delta", "final"])
    def test_are_in_every_field_those_of_llm(self, world, llm, kind):
        params = SamplingParams(
            temperature=1.2, seed=3, n=3, max_tokens=9, stop=["e", "qu"], logprobs=2, prompt_logprobs=1
        )
        prompts = ["some text", {"prompt": "other"}, {"prompt_token_ids": PROMPT}]
        expected = world.llm().generate(prompts, params, use_tqdm=False, lora_request=world.request("qv"))

        async def main():
            return await asyncio.gather(
                *(
                    collect(llm, str(i), params, world.request("qv"), p, output_kind=kind)
                    for i, p in enumerate(prompts)
                )
            )

        for outputs, wanted in zip(asyncio.run(main()), expected):
            assert without_steps(outputs[-1]) == without_steps(wanted)
            if kind == "delta":
                for i, answer in enumerate(wanted.outputs):
                    assert "".join(output.outputs[i].delta_text for output in outputs) == answer.text

    def test_have_the_times_of_their_request(self, llm):
        before = time.monotonic()
        times = asyncio.run(collect(llm, "a", greedy(5)))[-1].metrics

        order = [before, times.arrival_time, times.first_scheduled_time, times.first_token_time]
        order += [times.finished_time, time.monotonic()]
        assert order == sorted(order)


def without_steps(output):
    """Without what depends on when it was asked, and on whose rows were beside its own."""
    answers = [
        replace(
            answer,
            delta_text="",
            delta_token_ids=[],
            cumulative_logprob=round(answer.cumulative_logprob, 9),
            logprobs=rounded(answer.logprobs),
        )
        for answer in output.outputs
    ]
    prompt_logprobs = rounded(output.prompt_logprobs)
    changes = {"outputs": answers, "prompt_logprobs": prompt_logprobs, "num_cached_tokens": 0}
    return replace(output, request_id="", metrics=None, **changes)


def rounded(logprobs):
    return [
        each and {token: replace(found, logprob=round(found.logprob, 9)) for token, found in each.items()}
        for each in logprobs
    ]


class TestARequest:
    @pytest.mark.parametrize("how", ["dropped", "aborted"])
    def test_whose_consumer_leaves_is_aborted(self, llm, how):
        async def main():
            answers = llm.generate(PROMPT, greedy(600), "long")
            await anext(answers)
            if how == "aborted":
                await llm.abort(["long", "nobody"])
                last = [output async for output in answers][-1]
                assert last.outputs[0].finish_reason == "abort" and len(tokens_of(last)) < 600
            del answers
            gc.collect()
            await some_turns()
            await llm.call(check_is_empty)

        asyncio.run(main())

    @pytest.mark.parametrize(
        ("prompt", "params"),
        [([], greedy(4)), ("a" * 100_000, greedy(4)), (PROMPT, "none")],
        ids=["empty", "long", "params"],
    )
    def test_that_is_refused_gets_the_engines_error(self, world, llm, prompt, params):
        engine = world.engine(character_tokenizer())
        with pytest.raises((ValueError, TypeError)) as expected:
            engine.add_request("a", prompt, params)

        with pytest.raises(expected.type) as error:
            asyncio.run(collect(llm, "a", params, prompt=prompt))

        assert str(error.value) == str(expected.value)

    def test_whose_loop_is_closed_ends(self, llm):
        loop = asyncio.new_event_loop()
        answers = llm.generate(PROMPT, greedy(600), "long")
        loop.run_until_complete(anext(answers))
        loop.close()

        asyncio.run(collect(llm, "other", greedy(30)))

        asyncio.run(llm.call(check_is_empty))
        with pytest.raises(StopIteration):
            answers.aclose().send(None)
        llm._open.clear()  # its generator could not run to its end

    def test_of_an_adapter_that_only_resolvers_here_find_is_answered(self, world, llm):
        class Resolver:
            async def resolve_lora(self, base_model_name, lora_name):
                return world.request("mlp") if lora_name == "mlp" else None

        LoRAResolverRegistry.register_resolver("here", Resolver())
        try:
            outputs = asyncio.run(collect(llm, "a", greedy(6), "mlp"))
            with pytest.raises(ValueError, match=r"adapter 'nobody' is unknown .*resolvers asked: here"):
                asyncio.run(collect(llm, "b", greedy(6), "nobody"))
        finally:
            LoRAResolverRegistry.resolvers.pop("here")

        assert tokens_of(outputs[-1]) == world.oracle().greedy("mlp", PROMPT, 6)

    def test_with_an_id_that_another_has_leaves_the_other_its_own(self, world, llm, tmp_path):
        async def main():
            await llm.call(hold_after, 3, tmp_path / "go")
            first = asyncio.create_task(collect(llm, "same", greedy(40)))
            second = asyncio.create_task(collect(llm, "same", greedy(5)))
            await some_turns()  # by now it has been sent
            # This is answered behind what came before it, also while a step holds up the engine.
            await asyncio.wrap_future(llm._client.abort([], sink=object()))
            (tmp_path / "go").touch()
            with pytest.raises(ValueError, match="in use"):
                await second
            return await first

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy(None, PROMPT, 40)


class TestAdapters:
    def test_come_and_go_and_their_names_are_known_here(self, world, llm):
        async def main():
            assert await llm.add_lora(world.request("qv"))
            assert "qv" in llm.adapter_names and 1 in await llm.list_loras()
            assert await llm.pin_lora(1) and await llm.unpin_lora(1)
            outputs = await collect(llm, "a", greedy(6), "qv")
            assert await llm.remove_lora(1)
            assert "qv" not in llm.adapter_names and 1 not in await llm.list_loras()
            return outputs

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)

    def test_have_their_events_sent_as_they_happen(self, world, llm):
        events = []

        async def main():
            await llm.watch_adapters(events.append)
            await llm.add_lora(world.request("qv"))
            await llm.remove_lora(1)
            await llm.list_loras()

        asyncio.run(main())
        kinds = [event.kind for event in events]
        assert kinds.index("load") < kinds.index("remove") and events[kinds.index("load")].name == "qv"


class TestACall:
    @pytest.mark.parametrize("function", [lambda engine: None, LLMEngine.step, os.system])
    def test_is_one_of_those_that_were_named_when_the_process_began(self, llm, function):
        with pytest.raises(ValueError, match="is not a call that an engine in another process takes"):
            asyncio.run(llm.call(function))

    def test_whose_result_cannot_be_sent_says_so(self, llm):
        with pytest.raises(RuntimeError, match="cannot be sent to another process"):
            asyncio.run(llm.call(engine_itself))

    def test_that_is_cancelled_in_the_queue_is_not_run(self, llm, tmp_path):
        go, never_made = tmp_path / "go", tmp_path / "never made"

        async def main():
            held = asyncio.create_task(llm.call(wait_for, go))
            await until(lambda: len(llm._client._calls) == 1)
            never = asyncio.create_task(llm.call(touch, never_made))
            await until(lambda: len(llm._client._calls) == 2)
            never.cancel()
            await until(lambda: len(llm._client._calls) == 1)
            # The engine is held up; whoever reads there for it answers this at once, and behind what came before.
            await asyncio.wrap_future(llm._client.abort([], sink=object()))
            go.touch()
            await held
            await llm.call(process_id)

        asyncio.run(main())
        assert not never_made.exists()

    def test_of_steps_gets_them_until_it_unsubscribes(self, llm):
        async def main():
            records = llm.subscribe(step_records)
            first = asyncio.ensure_future(anext(records))
            await llm.list_loras()  # the subscription was before it
            await collect(llm, "a", greedy(8))
            heard = await first
            while len(heard) < 8:
                heard += await anext(records)
            await records.aclose()
            await llm.list_loras()
            return heard

        heard = asyncio.run(asyncio.wait_for(main(), PATIENCE))
        assert [len(record.rows) for record in heard] == [1] * 8
        assert not llm._client._listeners or len(llm._client._listeners) == 1  # the one of adapters

    def test_that_logs_is_heard_here(self, llm, caplog):
        asyncio.run(llm.call(say, "something is odd"))

        assert [record.message for record in caplog.records] == ["something is odd"]


class TestTheEngine:
    @pytest.mark.nightly  # by day tests/server/test_server_process.py kills one
    def test_that_is_killed_ends_every_request_and_all_that_comes_later(self, own):
        async def main():
            running = [own.generate(PROMPT, greedy(3000), f"r{i}") for i in range(3)]
            for answers in running:
                await anext(answers)
            os.kill(await own.call(process_id), signal.SIGKILL)
            for answers in running:
                await ends(the_rest(answers), "killed by signal 9")
            for late in (own.check_health(), own.list_loras(), collect(own, "late", greedy(3))):
                await ends(late, "killed by signal 9")

        asyncio.run(main())

    def test_whose_steps_raise_ends_with_the_reason(self, own):
        async def main():
            answers = own.generate(PROMPT, greedy(3000), "a")
            await anext(answers)
            await own.call(break_steps)
            await ends(the_rest(answers), "ZeroDivisionError: a step that is broken")
            await ends(own.check_health(), "ZeroDivisionError")

        asyncio.run(main())

    def test_that_is_shut_down_in_the_middle_says_so(self, own):
        async def main():
            answers = own.generate(PROMPT, greedy(3000), "a")
            await anext(answers)
            await asyncio.to_thread(own.shutdown)
            for late in (the_rest(answers), own.check_health(), collect(own, "b", greedy(3))):
                await ends(late, "shut down")

        asyncio.run(main())
        assert own._client._process.returncode == 0

    @pytest.mark.nightly
    def test_of_the_last_reference_ends_with_it(self, world):
        args = EngineArgs(model=str(world.base), **OPTIONS)
        llm = AsyncLLM.from_engine_args(args, more_calls=[process_id])
        pid = asyncio.run(llm.call(process_id))
        assert is_there(pid)

        del llm
        gc.collect()

        assert not is_there(pid)

    def test_that_cannot_be_made_says_why(self, world):
        with pytest.raises(ValueError, match="no such engine; make another one"):
            engine_process(fail_to_make)

    @pytest.mark.nightly
    def test_that_dies_while_it_is_made_raises_engine_dead_error(self, world):
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            engine_process(die_while_made)


PARENT = """
import asyncio, sys, time
from minivllm import AsyncLLM, EngineArgs
from tests.worlds.engines import OPTIONS
llm = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1], **OPTIONS))
print(llm._client._process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.nightly
def test_the_engine_ends_when_its_client_is_killed(world):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(world.base)], stdout=subprocess.PIPE, env=environment, text=True
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()

    wait_until(lambda: not is_there(pid))
