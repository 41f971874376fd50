"""An engine in a thread or a process of its own, and what event loops hear of it."""

import asyncio
import gc
import importlib
import threading
import time

import pytest

from labs.kit.overlay import Todo
from minivllm import AsyncLLM, LLMEngine, SamplingParams
from minivllm.errors import EngineDeadError
from minivllm.serving.async_llm import Draining, QueueFull
from minivllm.serving.calls import step_records
from tests.oracles.invariants import check_engine
from tests.worlds.engines import greedy, tokens_of
from tests.worlds.models import character_tokenizer
from tests.worlds.processes import check_is_empty, hold_after, open_requests, steps_taken, wait_for
from tests.worlds.waiting import PATIENCE, some_turns, threads_end, until

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.nightly)])
def serve(world, request):
    """Makes AsyncLLMs of tiny engines; when the test is over nothing of it may be left in them."""
    made, before = [], threading.active_count()

    def make(max_queued=None, tokenizer=None, **options):
        if request.param == "process":
            made.append(AsyncLLM(world.engine_process(tokenizer, **options), max_queued=max_queued))
        else:
            made.append(AsyncLLM.from_engine(world.engine(tokenizer, **options), max_queued=max_queued))
        return made[-1]

    yield make
    for llm in made:
        is_whole = llm._client.error is None
        if is_whole and request.param == "process":
            asyncio.run(llm.call(check_is_empty))
        llm.shutdown()
        if is_whole and request.param == "thread":
            check_engine(llm._client.engine, [])
    threads_end(before)


# For tests that reach into the engine.
in_a_thread = pytest.mark.parametrize("serve", ["thread"], indirect=True)


async def collect(llm, request_id, params, lora=None, prompt=PROMPT, **options):
    return [o async for o in llm.generate(prompt, params, request_id, lora, **options)]


def deltas(outputs, index=0):
    return [token for output in outputs for token in output.outputs[index].delta_token_ids]


async def nothing_left(llm):
    """What was posted before this has been done."""
    assert not await llm.call(open_requests)
    assert not running(llm) and not llm._open


def running(llm):
    """Ids of the requests whose last output has not come."""
    if hasattr(llm._client, "sinks"):
        return list(llm._client.sinks)
    return [reader.request_id for _, reader in list(llm._client._requests.values())]


async def runs(llm, *request_ids):
    """Waits until they are with the engine's client."""
    await until(lambda: {*request_ids} <= {*running(llm)})


async def has_ended(llm, request_id):
    """Waits until its last output has come, for whoever takes it."""
    await until(lambda: request_id not in running(llm))
    await llm.call(steps_taken)  # by now the engine has handed out all that it had


class TestAnswers:
    def test_of_all_adapters_have_the_tokens_of_peft(self, world, serve):
        llm, names = serve(), [None, *world.names] * 2

        async def main():
            return await asyncio.gather(
                *(collect(llm, f"r{i}", greedy(6 + i), world.request(name)) for i, name in enumerate(names))
            )

        for i, outputs in enumerate(asyncio.run(main())):
            expected = world.oracle().greedy(names[i], PROMPT, 6 + i)
            assert tokens_of(outputs[-1]) == deltas(outputs) == expected
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    def test_of_text_and_to_several_at_once_are_those_of_llm(self, world, serve):
        llm = serve(tokenizer=character_tokenizer())
        params = SamplingParams(temperature=1.2, seed=3, n=3, max_tokens=9, stop=["e", "qu"])
        prompts = ["some text", {"prompt": "other"}, {"prompt_token_ids": PROMPT}]
        expected = world.llm().generate(prompts, params, use_tqdm=False, lora_request=world.request("qv"))

        async def main():
            return await asyncio.gather(
                *(collect(llm, str(i), params, world.request("qv"), p) for i, p in enumerate(prompts))
            )

        for outputs, wanted in zip(asyncio.run(main()), expected):
            assert outputs[-1].prompt == wanted.prompt
            for i, answer in enumerate(wanted.outputs):
                last = outputs[-1].outputs[i]
                assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == (
                    *(answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason),
                )
                assert "".join(output.outputs[i].delta_text for output in outputs) == answer.text

    def test_by_name_are_those_of_an_adapter_that_was_added(self, world, serve):
        llm = serve()

        async def main():
            assert await llm.add_lora(world.request("qv"))
            assert await llm.list_loras() == {1}
            assert await llm.pin_lora(1) and await llm.unpin_lora(1)
            outputs = await collect(llm, "a", greedy(6), "qv")
            assert await llm.remove_lora(1)
            assert await llm.list_loras() == set()
            return outputs

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)

    def test_come_to_loops_of_several_threads(self, world, serve):
        llm, answers = serve(), {}

        def loop(name):
            answers[name] = asyncio.run(collect(llm, name, greedy(9), world.request(name)))

        threads = [threading.Thread(target=loop, args=(name,)) for name in world.names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

        for name in world.names:
            assert tokens_of(answers[name][-1]) == world.oracle().greedy(name, PROMPT, 9)

    def test_of_the_final_kind_come_once_and_the_newest_stands_for_all(self, world, serve):
        llm = serve()

        async def main():
            final = await collect(llm, "a", greedy(9), output_kind="final")
            newest = [output async for output in slowly(llm, "b", 9, output_kind="cumulative")]
            return final, newest

        final, newest = asyncio.run(main())
        expected = world.oracle().greedy(None, PROMPT, 9)
        assert len(final) == 1 and tokens_of(final[0]) == expected
        assert tokens_of(newest[-1]) == expected and len(newest) <= 2


async def slowly(llm, request_id, length, **options):
    """Outputs of a request whose consumer takes the first, and looks again when all are there."""
    async for output in llm.generate(PROMPT, greedy(length), request_id, **options):
        yield output
        await has_ended(llm, request_id)


class TestASlowConsumer:
    def test_delays_no_other_and_gets_all_outputs_meanwhile_as_one(self, world, serve):
        llm = serve()

        async def main():
            slow = llm.generate(PROMPT, greedy(60), "slow", world.request("qv"))
            first = await anext(slow)
            others = [await collect(llm, f"r{i}", greedy(30)) for i in range(2)]
            await has_ended(llm, "slow")
            return others, [first] + [output async for output in slow]

        others, slow = asyncio.run(main())
        assert all(tokens_of(o[-1]) == world.oracle().greedy(None, PROMPT, 30) for o in others)
        assert len(slow) <= 2 and slow[-1].finished
        assert deltas(slow) == tokens_of(slow[-1]) == world.oracle().greedy("qv", PROMPT, 60)

    def test_whose_loop_stands_still_lets_nothing_pile_up_there(self, world, serve):
        """Each step may wake a loop once, and does not when it was woken already."""
        llm, calls = serve(), []

        async def main():
            loop = asyncio.get_running_loop()
            slow = llm.generate(PROMPT, greedy(40), "slow")
            await anext(slow)
            post = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda function, *args: (
                calls.append(function) or post(function, *args)
            )
            while "slow" in running(llm):
                time.sleep(0.001)  # the engine's thread goes on, this loop does not
            await slow.aclose()

        asyncio.run(main())
        assert len(calls) <= 1


class TestWhoStopsListening:
    @pytest.mark.parametrize("how", ["cancelled", "dropped"])
    def test_ends_the_request(self, world, serve, how):
        llm = serve()

        async def listen():
            async for _ in llm.generate(PROMPT, greedy(3000), "long", world.request("qv")):
                asyncio.current_task().cancel()

        async def main():
            if how == "dropped":
                answers = llm.generate(PROMPT, greedy(3000), "long", world.request("qv"))
                await anext(answers)
                assert "long" in await llm.call(open_requests)
                del answers
            else:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.create_task(listen())
            gc.collect()
            await some_turns()
            await nothing_left(llm)

        asyncio.run(main())

    def test_before_the_request_is_in_the_engine_leaves_none(self, world, serve, tmp_path):
        llm = serve(tokenizer=character_tokenizer())
        go = tmp_path / "go"

        async def main():
            llm._client.call(wait_for, go)
            tasks = [asyncio.create_task(collect(llm, f"{i}", greedy(3000), prompt="text")) for i in range(4)]
            await some_turns()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            go.touch()
            await nothing_left(llm)

        asyncio.run(main())

    @in_a_thread
    def test_by_closing_its_loop_ends_the_request(self, world, serve):
        llm = serve()
        loop = asyncio.new_event_loop()
        answers = llm.generate(PROMPT, greedy(3000), "long")
        loop.run_until_complete(anext(answers))
        loop.close()

        async def main():
            await collect(llm, "other", greedy(5))
            assert await llm.call(lambda engine: not engine.has_unfinished_requests())

        asyncio.run(main())
        with pytest.raises(StopIteration):
            answers.aclose().send(None)


class TestAnAbort:
    def test_is_the_last_output_of_its_consumer(self, world, serve):
        llm = serve()

        async def main():
            running = asyncio.create_task(collect(llm, "a", greedy(3000)))
            drawn = SamplingParams(n=2, max_tokens=3000, ignore_eos=True)
            waiting = asyncio.create_task(collect(llm, "b", drawn))
            await runs(llm, "a", "b")
            await llm.abort(["a", "nobody", "b"])
            assert not await llm.call(open_requests)
            return await running, await waiting

        for outputs in asyncio.run(main()):
            assert outputs[-1].finished
            assert {answer.finish_reason for answer in outputs[-1].outputs} == {"abort"}
            assert deltas(outputs) == tokens_of(outputs[-1])

    def test_in_the_engine_itself_is_the_last_output_too(self, world, serve):
        llm = serve()

        async def main():
            running = asyncio.create_task(collect(llm, "a", greedy(3000)))
            await runs(llm, "a")
            await llm.call(LLMEngine.abort_request, "a")
            return await running

        assert asyncio.run(main())[-1].outputs[0].finish_reason == "abort"


class TestAnUnload:
    def test_is_done_when_the_requests_that_use_the_adapter_have_ended(self, world, serve):
        llm = serve()

        async def main():
            answers = asyncio.ensure_future(collect(llm, "a", greedy(80), world.request("qv")))
            while not await llm.list_loras():
                await asyncio.sleep(0)
            unloads = asyncio.ensure_future(llm.remove_lora(1))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match=r"'qv' .* is being unloaded"):
                await collect(llm, "b", greedy(2), "qv")
            assert await unloads
            assert "a" not in running(llm) and "qv" not in llm.adapter_names
            assert await llm.list_loras() == set()
            assert not await llm.remove_lora(1), "it is not known any more"
            await llm.add_lora(world.request("qv"))
            return await answers

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 80)

    def test_whose_caller_was_cancelled_is_done_all_the_same(self, world, serve):
        llm = serve()

        async def main():
            answers = asyncio.ensure_future(collect(llm, "a", greedy(80), world.request("qv")))
            while not await llm.list_loras():
                await asyncio.sleep(0)
            unloads = asyncio.ensure_future(llm.remove_lora(1))
            await asyncio.sleep(0)
            await llm.call(open_requests)  # the order was there before this
            unloads.cancel()
            outputs = await answers
            return outputs, await llm.list_loras()

        outputs, loras = asyncio.run(main())
        assert tokens_of(outputs[-1]) == world.oracle().greedy("qv", PROMPT, 80)
        assert loras == set()


class TestARefusal:
    @pytest.mark.parametrize(
        "prompt, options, error",
        [
            ([], {}, ValueError),
            ("text", {}, ValueError),
            (PROMPT, {"lora": "nobody"}, ValueError),
            (PROMPT, {"params": "none"}, TypeError),
        ],
        ids=["empty", "no tokenizer", "adapter", "params"],
    )
    def test_comes_before_anything_runs(self, world, serve, prompt, options, error):
        llm = serve()

        async def main():
            with pytest.raises(error):
                await collect(llm, "a", options.get("params", greedy(4)), options.get("lora"), prompt)
            await nothing_left(llm)

        asyncio.run(main())
        assert asyncio.run(llm.call(steps_taken)) == 0

    def test_comes_at_once_when_the_queue_is_full(self, world, serve):
        llm = serve(max_queued=1, max_num_seqs=2)

        async def main():
            tasks = [asyncio.create_task(collect(llm, f"{i}", greedy(20))) for i in range(5)]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            return answers, await collect(llm, "later", greedy(20))

        answers, later = asyncio.run(main())
        full = [answer for answer in answers if isinstance(answer, QueueFull)]
        assert len(full) == 2 and "max_queued" in str(full[0])
        expected = world.oracle().greedy(None, PROMPT, 20)
        assert [tokens_of(a[-1]) for a in [*answers, later] if not isinstance(a, QueueFull)] == [expected] * 4


class TestTheEnd:
    def test_comes_by_draining_when_running_requests_have_finished(self, world, serve):
        llm = serve()

        async def main():
            running = asyncio.create_task(collect(llm, "a", greedy(50)))
            await runs(llm, "a")
            draining = asyncio.create_task(llm.drain(PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(Draining):
                await collect(llm, "b", greedy(5))
            await draining
            assert running.done()
            return running.result()

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy(None, PROMPT, 50)

    @in_a_thread
    def test_comes_by_draining_after_so_many_seconds(self, world, serve, tmp_path):
        llm = serve()

        async def main():
            await llm.call(hold_after, 3, tmp_path / "go")
            running = asyncio.create_task(collect(llm, "a", greedy(3000)))
            await runs(llm, "a")
            await llm.drain(0.05)
            assert not running.done()
            (tmp_path / "go").touch()
            llm.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await running
            with pytest.raises(EngineDeadError, match="shut down"):
                await collect(llm, "b", greedy(5))
            with pytest.raises(EngineDeadError, match="shut down"):
                await llm.list_loras()
            with pytest.raises(EngineDeadError, match="shut down"):
                await llm.run_in_tokenizer_thread(lambda: "text")
            with pytest.raises(EngineDeadError, match="shut down"):
                await llm.check_health()
            assert not llm._client.engine.has_unfinished_requests()

        asyncio.run(main())

    def test_of_the_last_reference_ends_the_thread(self, world):
        before = set(threading.enumerate())
        llm = AsyncLLM.from_engine(world.engine())
        asyncio.run(collect(llm, "a", greedy(3)))
        [thread] = set(threading.enumerate()) - before

        del llm
        gc.collect()

        assert not thread.is_alive()

    @in_a_thread
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), Todo("1.1", "x")], ids=repr)
    def test_by_an_error_that_is_not_recoverable_reaches_all_clients(self, world, serve, monkeypatch, error):
        llm = serve()

        def interrupted(*args):
            raise error

        async def main():
            answers = llm.generate(PROMPT, greedy(3000), "a")
            await anext(answers)
            await llm.check_health()
            monkeypatch.setattr(llm._client.engine.runner, "launch_model", interrupted)
            waiting = asyncio.create_task(collect(llm, "b", greedy(5)))
            for ending in (waiting, anext_until_the_end(answers), llm.list_loras(), llm.check_health()):
                with pytest.raises(EngineDeadError, match=type(error).__name__):
                    await ending

        asyncio.run(main())
        assert not llm._open

    @in_a_thread
    def test_by_an_interrupted_call_is_an_engine_dead_error(self, world, serve):
        llm = serve()

        def interrupted(engine):
            raise KeyboardInterrupt

        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            asyncio.run(llm.call(interrupted))
        llm._client._thread.join(PATIENCE)
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            asyncio.run(llm.check_health())


async def anext_until_the_end(answers):
    async for _ in answers:
        pass


@in_a_thread
class TestAStepThatRaises:
    def test_anywhere_else_ends_the_engine(self, world, serve, monkeypatch):
        llm = serve()
        raise_times(monkeypatch, llm._client.engine, "step", 1)

        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            asyncio.run(collect(llm, "a", greedy(8)))


def raise_times(monkeypatch, owner, name, times):
    method, raised = getattr(owner, name), []

    def raising(*args, **options):
        if len(raised) < times:
            raised.append(True)
            return 1 / 0
        return method(*args, **options)

    monkeypatch.setattr(owner, name, raising)


@in_a_thread
class TestSteps:
    def test_are_sent_to_subscribers_as_they_happen(self, world, serve):
        llm = serve()
        listeners = llm._client.engine.listeners
        before = len(listeners)

        async def main():
            heard = []

            async def listen():
                async for records in llm.subscribe(step_records):
                    heard.extend(records)

            listener = asyncio.create_task(listen())
            await until(lambda: len(listeners) == before + 1)
            await collect(llm, "a", greedy(8), world.request("qv"))
            await until(lambda: len(heard) >= 7)
            listener.cancel()
            await asyncio.wait([listener])
            await llm.list_loras()
            return heard

        heard = asyncio.run(asyncio.wait_for(main(), PATIENCE))
        assert heard == llm._client.engine.trace.records[: len(heard)]
        assert heard[0].rows[0].adapter == "qv"
        assert len(listeners) == before

    def test_pile_up_for_no_subscriber(self, world, serve):
        llm = serve()
        listeners = llm._client.engine.listeners
        before = len(listeners)

        async def main():
            records = llm.subscribe(step_records, most=3)
            first = asyncio.ensure_future(anext(records))
            await until(lambda: len(listeners) == before + 1)
            await collect(llm, "a", greedy(20))
            await first
            await collect(llm, "b", greedy(20))
            newest = await anext(records)
            await records.aclose()
            return newest

        assert asyncio.run(main()) == llm._client.engine.trace.records[-3:]


@in_a_thread
class TestTheLoop:
    def test_goes_on_while_a_step_a_load_and_a_tokenizer_stand_still(self, world, serve, monkeypatch):
        llm = serve(tokenizer=character_tokenizer())
        held, go = set(), threading.Event()
        hold(monkeypatch, llm._client.engine.runner, "launch_model", held, go)
        hold(monkeypatch, "minivllm.serving.async_llm", "tokenize", held, go)

        async def main():
            running = asyncio.create_task(collect(llm, "a", greedy(6)))
            reading = asyncio.create_task(collect(llm, "b", greedy(6), prompt="text"))
            await until(lambda: len(held) == 2)
            loading = asyncio.create_task(llm.add_lora(world.request("qv")))
            await some_turns()
            assert not running.done() and not reading.done() and not loading.done()
            go.set()
            return await asyncio.gather(running, reading, loading)

        running, reading, loaded = asyncio.run(main())
        assert loaded and reading[-1].prompt == "text"
        assert tokens_of(running[-1]) == world.oracle().greedy(None, PROMPT, 6)
        assert held == {"minivllm-engine", "minivllm-tokenizer_0"}


def hold(monkeypatch, owner, name, held, go):
    """Calls wait until they may go on; `held` gets the names of their threads."""
    if isinstance(owner, str):
        owner = importlib.import_module(owner)
    function = getattr(owner, name)

    def holding(*args, **options):
        held.add(threading.current_thread().name)
        assert go.wait(PATIENCE)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, holding)
