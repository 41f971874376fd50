"""Adapters are read concurrently with steps: requests that do not need them run on."""

import asyncio
import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from minivllm import AsyncLLM, LoRARequest
from minivllm.errors import EngineDeadError
from minivllm.observe.reports import AdapterState, state_of
from tests.oracles.invariants import check_engine, check_slot_contents
from tests.worlds.adapters import ADAPTERS, save_adapter
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.waiting import PATIENCE, threads_end, until

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def serve(world):
    made, before = [], threading.active_count()

    def make(parallel_reads=2, **options):
        made.append(AsyncLLM.from_engine(world.engine(**options), parallel_reads=parallel_reads))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
        check_engine(llm._client.engine, [])
        check_slot_contents(llm._client.engine)
        assert not llm._client.engine.adapters.worker.source.loading
    threads_end(before)


class Disk:
    """The worker's reads wait until they may go on; it knows how many there were, and at once."""

    def __init__(self, llm, monkeypatch):
        self.go = threading.Event()
        self.reading, self.most_at_once, self.threads = 0, 0, []
        source = llm._client.reader.source
        self._read, self._lock = source.load, threading.Lock()
        monkeypatch.setattr(source, "load", self.read)

    def read(self, lora_request):
        with self._lock:
            self.reading += 1
            self.most_at_once = max(self.most_at_once, self.reading)
            self.threads.append(threading.current_thread().name.partition("_")[0])
        assert self.go.wait(PATIENCE)
        with self._lock:
            self.reading -= 1
        return self._read(lora_request)


@pytest.fixture
def slow(serve, monkeypatch):
    """An engine and its disk."""

    def make(**options):
        llm = serve(**options)
        return llm, Disk(llm, monkeypatch)

    return make


def test_reading_threads_compute_on_one_thread(serve, world, monkeypatch):
    before = torch.get_num_threads()
    llm, threads = serve(), []
    source = llm._client.reader.source
    read = source.load

    def note(lora_request):
        threads.append(torch.get_num_threads())
        return read(lora_request)

    monkeypatch.setattr(source, "load", note)
    asyncio.run(collect(llm, "a", 3, world.request("qv")))

    assert threads == [1]
    assert torch.get_num_threads() == before


def test_reading_threads_put_an_adapter_where_a_gpu_copies_from(serve, world, monkeypatch):
    llm, staged = serve(), []
    manager = llm._client.engine.adapters.manager
    stage = manager.stage

    def note(adapter):
        staged.append((adapter.load_id, threading.current_thread().name.partition("_")[0]))
        stage(adapter)

    monkeypatch.setattr(manager, "stage", note)
    asyncio.run(collect(llm, "a", 3, world.request("qv")))

    assert staged[0][1] == "minivllm-reader"
    assert {load_id for load_id, _ in staged} == {staged[0][0]}


async def collect(llm, request_id, length, lora=None):
    return [o async for o in llm.generate(PROMPT, greedy(length), request_id, lora)]


def test_requests_of_other_adapters_and_none_run_while_one_is_read(world, slow):
    llm, disk = slow()

    async def main():
        waiting = asyncio.create_task(collect(llm, "a", 6, world.request("qv")))
        await until(lambda: disk.reading)
        assert await llm.call(lambda engine: state_of(engine.adapters, 1)) == AdapterState.LOADING
        others = await collect(llm, "b", 20)
        assert not waiting.done()
        reasons = {s.reason for record in llm._client.engine.trace.records for s in record.skipped}
        disk.go.set()
        return await waiting, others, reasons

    outputs, others, reasons = asyncio.run(main())
    assert tokens_of(outputs[-1]) == world.oracle().greedy("qv", PROMPT, 6)
    assert tokens_of(others[-1]) == world.oracle().greedy(None, PROMPT, 20)
    assert reasons == {"loading"} and disk.threads == ["minivllm-reader"]
    assert llm._client.engine.adapters.manager.stats.loads == 1


def test_no_step_is_taken_while_nothing_but_a_read_can_come(world, slow, monkeypatch):
    llm, disk = slow()
    step, steps = llm._client.engine.step, []
    monkeypatch.setattr(llm._client.engine, "step", lambda **options: steps.append(1) or step(**options))

    async def main():
        waiting = asyncio.create_task(collect(llm, "a", 4, world.request("qv")))
        await until(lambda: disk.reading)
        await asyncio.sleep(0.1)
        disk.go.set()
        return await waiting

    assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 4)
    assert len(steps) <= 4 + 4


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_are_read_at_once_than_may_be(world, slow, most):
    llm, disk = slow(parallel_reads=most, max_loras=4)

    async def main():
        tasks = [asyncio.create_task(collect(llm, n, 6, world.request(n))) for n in world.names]
        await until(lambda: disk.reading == most)
        await asyncio.sleep(0.02)
        assert len(llm._client.engine.adapters.worker.source.loading) == most
        disk.go.set()
        return await asyncio.gather(*tasks)

    for name, outputs in zip(world.names, asyncio.run(main())):
        assert tokens_of(outputs[-1]) == world.oracle().greedy(name, PROMPT, 6)
    assert disk.most_at_once == most


@pytest.mark.parametrize("most, slots", [(2, 4), (1, 1)])
def test_no_step_of_others_reads_what_many_wait_for(world, slow, most, slots):
    """As many adapters as may be have been read at once, when the next step admits their requests."""
    llm, disk = slow(parallel_reads=most, max_loras=slots, max_cpu_loras=slots)

    async def main():
        tasks = [asyncio.create_task(collect(llm, "base", 60))]
        await until(lambda: llm._client.engine.scheduler.running)
        tasks += [asyncio.create_task(collect(llm, n, 6, world.request(n))) for n in world.names]
        await until(lambda: len(llm._client.engine.scheduler.waiting.requests) == len(world.names))
        await until(lambda: disk.reading == most)
        disk.go.set()
        return await asyncio.gather(*tasks)

    base, *others = asyncio.run(main())
    assert tokens_of(base[-1]) == world.oracle().greedy(None, PROMPT, 60)
    for name, outputs in zip(world.names, others):
        assert tokens_of(outputs[-1]) == world.oracle().greedy(name, PROMPT, 6)
    assert disk.threads == ["minivllm-reader"] * len(world.names)


def test_the_next_is_read_during_the_step_that_takes_the_one_before(world, slow):
    llm, disk = slow(parallel_reads=1, max_loras=4)
    begun = []
    load = llm._client.reader.load

    def note(lora_request):
        begun.append(len(llm._client.engine.adapters.worker.source.loading))
        return load(lora_request)

    llm._client.reader.load = note

    async def main():
        tasks = [asyncio.create_task(collect(llm, n, 6, world.request(n))) for n in world.names[:2]]
        await until(lambda: disk.reading and len(llm._client.engine.scheduler.waiting.requests) == 2)
        disk.go.set()
        return await asyncio.gather(*tasks)

    for name, outputs in zip(world.names[:2], asyncio.run(main())):
        assert tokens_of(outputs[-1]) == world.oracle().greedy(name, PROMPT, 6)
    assert begun == [2, 1] and disk.most_at_once == 1


def test_one_that_cannot_be_read_ends_its_requests_alone(world, slow, tmp_path):
    llm, disk = slow()
    save_adapter(tmp_path / "bad", world.base, 1, **ADAPTERS["qv"])
    bad = LoRARequest("bad", 9, str(tmp_path / "bad"))

    async def main():
        failing = asyncio.create_task(collect(llm, "a", 6, bad))
        await until(lambda: disk.reading)
        (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
        disk.go.set()
        return await failing, await collect(llm, "b", 6, world.request("qv"))

    failed, served = asyncio.run(main())
    assert failed[-1].outputs[0].finish_reason == "error" and "adapter 'bad'" in failed[-1].error
    assert tokens_of(served[-1]) == world.oracle().greedy("qv", PROMPT, 6)
    assert 9 not in llm._client.engine.adapters.adapters


def test_an_adapter_without_waiting_requests_is_read_again_for_the_next(world, slow, tmp_path):
    """The folder has changed since."""
    llm, disk = slow()
    folder = tmp_path / "changing"
    save_adapter(folder, world.base, 1, **ADAPTERS["qv"])
    adapter = LoRARequest("changing", 9, str(folder))

    async def main():
        gone = asyncio.create_task(collect(llm, "a", 6, adapter))
        await until(lambda: disk.reading)
        gone.cancel()
        await asyncio.wait([gone])
        await llm.call(lambda engine: None)  # the engine has heard of it, or it could still join
        disk.go.set()
        await until(lambda: not disk.reading)
        shutil.copytree(world.path("qv"), folder, dirs_exist_ok=True)
        return await collect(llm, "b", 6, adapter)

    assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)
    assert disk.threads == ["minivllm-reader"] * 2


def test_an_adapter_that_was_read_and_has_no_slot_blocks_no_other_read(world, slow, monkeypatch):
    llm, disk = slow(parallel_reads=1)
    disk.go.set()
    fits = llm._client.engine.scheduler.lora.fits

    async def main():
        monkeypatch.setattr(llm._client.engine.scheduler.lora, "fits", lambda adapter_id: adapter_id != 1)
        waiting = asyncio.create_task(collect(llm, "a", 6, world.request("qv")))
        await until(lambda: disk.threads and not llm._client.reader.is_reading)
        outputs = await collect(llm, "b", 6, world.request("all"))
        assert not waiting.done()
        monkeypatch.setattr(llm._client.engine.scheduler.lora, "fits", fits)
        return outputs, await waiting

    for name, outputs in zip(("all", "qv"), asyncio.run(main())):
        assert tokens_of(outputs[-1]) == world.oracle().greedy(name, PROMPT, 6)


class TestALoadAhead:
    def test_holds_up_no_step(self, world, slow):
        llm, disk = slow()

        async def main():
            loads = [asyncio.create_task(llm.add_lora(world.request("qv"))) for _ in range(2)]
            await until(lambda: disk.reading)
            await collect(llm, "a", 20)
            assert not any(load.done() for load in loads)
            disk.go.set()
            assert await asyncio.gather(*loads) == [True, True]
            return await collect(llm, "b", 6, "qv")

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)
        assert disk.threads == ["minivllm-reader"]

    def test_again_is_read_again(self, world, slow):
        llm, disk = slow()
        disk.go.set()

        async def main():
            assert await llm.add_lora(world.request("qv"))
            assert await llm.add_lora(world.request("qv", load_inplace=True))
            assert await llm.add_lora(world.request("qv"))
            return await collect(llm, "b", 6, "qv")

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)
        assert disk.threads == ["minivllm-reader"] * 2

    def test_over_a_link_is_read_once_and_concurrently_with_steps(self, world, slow, tmp_path):
        llm, disk = slow()
        link = tmp_path / "current"
        link.symlink_to(world.path("qv"))
        current = LoRARequest("current", 9, str(link))
        disk.go.set()

        async def main():
            assert await llm.add_lora(current)
            assert await llm.add_lora(replace(current, load_inplace=True))
            assert not llm._client.engine.adapters.worker.source.loading
            return await collect(llm, "a", 6, current)

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)
        assert disk.threads == ["minivllm-reader"] * 2

    def test_over_a_link_that_changes_meanwhile_is_read_again_from_its_new_folder(
        self, world, slow, tmp_path
    ):
        llm, disk = slow()
        link = tmp_path / "current"
        link.symlink_to(world.path("qv"))

        async def main():
            load = asyncio.create_task(llm.add_lora(LoRARequest("current", 9, str(link))))
            await until(lambda: disk.reading)
            link.unlink()
            link.symlink_to(world.path("all"))
            disk.go.set()
            assert await load
            await until(lambda: not llm._client.engine.adapters.worker.source.loading)
            return await collect(llm, "a", 6, "current")

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("all", PROMPT, 6)

    def test_that_is_cancelled_leaves_nothing(self, world, slow):
        llm, disk = slow()

        async def main():
            load = asyncio.create_task(llm.add_lora(world.request("qv")))
            await until(lambda: disk.reading)
            load.cancel()
            await asyncio.wait([load])
            disk.go.set()
            assert await llm.list_loras() == set()
            assert not llm._client.engine.adapters.worker.source.loading

        asyncio.run(main())


class Header:
    """The worker's checks of headers wait until they may go on."""

    def __init__(self, llm, monkeypatch):
        self.go, self.threads = threading.Event(), []
        source = llm._client.reader.source
        read = source.check

        def check(lora_request):
            self.threads.append(threading.current_thread().name.partition("_")[0])
            assert self.go.wait(PATIENCE)
            return read(lora_request)

        monkeypatch.setattr(source, "check", check)


class TestTheCheckOfAnAdapterThatTheEngineHasNeverSeen:
    def test_delays_no_other_request(self, world, serve, monkeypatch):
        llm = serve()
        header = Header(llm, monkeypatch)

        async def main():
            waiting = [asyncio.create_task(collect(llm, name, 6, world.request("qv"))) for name in "ab"]
            await until(lambda: header.threads)
            others = await collect(llm, "c", 20)
            assert not any(task.done() for task in waiting)
            header.go.set()
            return others, *await asyncio.gather(*waiting)

        outputs = [answer[-1] for answer in asyncio.run(main())]

        for output, name, length in zip(outputs, (None, "qv", "qv"), (20, 6, 6)):
            assert tokens_of(output) == world.oracle().greedy(name, PROMPT, length)
        assert header.threads == ["minivllm-checker"]

    def test_refuses_the_request_as_the_engine_does(self, world, serve, tmp_path):
        llm, engine = serve(), world.engine()
        requests = [LoRARequest("gone", 7, str(tmp_path / "nowhere"))]
        shutil.copytree(world.request("qv").lora_path, tmp_path / "wide")
        config = json.loads((tmp_path / "wide" / "adapter_config.json").read_text())
        (tmp_path / "wide" / "adapter_config.json").write_text(json.dumps(config | {"r": 64}))
        requests.append(LoRARequest("wide", 8, str(tmp_path / "wide")))

        for request in requests:
            with pytest.raises((ValueError, FileNotFoundError)) as expected:
                engine.add_request("a", PROMPT, greedy(3), lora_request=request)
            with pytest.raises(type(expected.value)) as refused:
                asyncio.run(collect(llm, "a", 3, request))
            assert str(refused.value) == str(expected.value)

        assert not llm.adapter_names

    def test_of_a_request_that_was_aborted_leaves_nothing(self, world, serve, monkeypatch):
        llm = serve()
        header = Header(llm, monkeypatch)

        async def main():
            waiting = asyncio.create_task(collect(llm, "a", 6, world.request("qv")))
            await until(lambda: header.threads)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            aborted = asyncio.create_task(collect(llm, "b", 6, world.request("mlp")))
            await until(lambda: len(header.threads) == 2)
            await llm.abort("b")
            header.go.set()
            answers = await aborted, await collect(llm, "c", 3)
            return answers, await llm.call(lambda engine: set(engine.output_processor.states))

        (ended, answer), left = asyncio.run(main())

        assert [output.outputs[0].finish_reason for output in ended] == ["abort"]
        assert tokens_of(answer[-1]) == world.oracle().greedy(None, PROMPT, 3)
        assert not left and not llm.adapter_names

    def test_keeps_the_id_of_its_request(self, world, serve, monkeypatch):
        llm = serve()
        header = Header(llm, monkeypatch)

        async def main():
            waiting = asyncio.create_task(collect(llm, "a", 6, world.request("qv")))
            await until(lambda: header.threads)
            with pytest.raises(ValueError, match="request id 'a' is in use"):
                await collect(llm, "a", 3)
            header.go.set()
            return await waiting

        assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("qv", PROMPT, 6)

    @pytest.mark.parametrize("end", ["shutdown", "death"])
    def test_lets_no_request_wait_for_an_engine_that_has_ended(self, world, serve, monkeypatch, end):
        llm = serve()
        header = Header(llm, monkeypatch)

        def die(engine):
            raise KeyboardInterrupt

        async def main():
            waiting = asyncio.create_task(collect(llm, "a", 6, world.request("qv")))
            await until(lambda: header.threads)
            if end == "death":
                with pytest.raises(EngineDeadError):
                    await llm.call(die)
            else:
                await asyncio.to_thread(llm.shutdown)
            try:
                await asyncio.wait_for(waiting, PATIENCE)
            finally:
                header.go.set()

        with pytest.raises(EngineDeadError):
            asyncio.run(main())

    def test_leaves_ids_that_are_no_text_to_the_engine(self, world, serve):
        llm = serve()

        with pytest.raises(TypeError, match="request_id must be str, got \\['a'\\]"):
            asyncio.run(collect(llm, ["a"], 3, world.request("qv")))


def test_a_pin_reads_at_once_what_was_only_ordered(world, slow):
    """One is read, another waits for the one thread; no step can wait for it."""
    llm, disk = slow(parallel_reads=1)

    async def main():
        loads = [asyncio.create_task(llm.add_lora(world.request(n))) for n in ("qv", "all")]
        await until(lambda: len(llm._client.engine.adapters.worker.source.loading) == 2)
        running = asyncio.create_task(collect(llm, "a", 6, world.request("all")))
        await until(lambda: 2 in llm._client.engine.adapters.adapters)
        pin = asyncio.create_task(llm.pin_lora(2))
        await until(lambda: disk.reading == 2)
        disk.go.set()
        assert await pin and await asyncio.gather(*loads) == [True, True]
        return await running

    assert tokens_of(asyncio.run(main())[-1]) == world.oracle().greedy("all", PROMPT, 6)
    assert disk.threads[:2] == ["minivllm-reader", "minivllm-engine"]


def test_an_engine_that_is_given_back_reads_by_itself(world, slow):
    llm, disk = slow()
    disk.go.set()
    llm.shutdown()

    llm._client.engine.add_request("a", PROMPT, greedy(6), lora_request=world.request("qv"))
    outputs = run(llm._client.engine)

    assert tokens_of(outputs["a"]) == world.oracle().greedy("qv", PROMPT, 6)
    assert disk.threads == [threading.current_thread().name]
