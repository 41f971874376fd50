"""Names of models, and adapters that come and go (lab 9.4). The oracle is a list of the engine's calls."""

import asyncio

import pytest

from minivllm import AsyncLLM, SamplingParams
from minivllm.lora.request import LoRARequest
from minivllm.server.errors import ApiError
from minivllm.server.keys import Holder
from minivllm.server.names import ModelNames
from minivllm.server.protocol import LoadAdapterRequest
from minivllm.server.settings import ServerSettings
from minivllm.sources.resolver import stable_id
from tests.worlds import virtual_time
from tests.worlds.small import SmallWorld, write_adapter
from tests.worlds.waiting import PATIENCE

pytestmark = pytest.mark.lab("9.4")

SOON = 60  # seconds, until what must come is given up; of virtual time
ANYBODY = Holder()


def run(coroutine):
    return virtual_time.run(coroutine, 2 * SOON)


def run_beside_an_engine(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


class FakeLLM(AsyncLLM):
    """An engine without a model that notes what it is told, and knows what it was given.

    gate    until it is set the engine reads and unloads nothing
    bad     a path that cannot be read
    """

    def __init__(self, bad=None, lora=True):
        self.told, self.bad, self.gate = [], bad, asyncio.Event()
        self.gate.set()
        self.by_name, self.lora = {}, lora
        self.config = self.tokenizer = None

    @property
    def adapter_names(self):
        return self.by_name.keys() if self.lora else ()

    async def list_loras(self):
        return set(self.by_name.values())

    async def add_lora(self, request):
        self.told.append(("add", request))
        await self.gate.wait()
        if request.lora_path == self.bad:
            raise ValueError(f"{self.bad} is no adapter")
        self.by_name[request.lora_name] = request.lora_int_id
        return True

    async def remove_lora(self, adapter_id):
        self.told.append(("remove", adapter_id))
        await self.gate.wait()
        names = [name for name, known in self.by_name.items() if known == adapter_id]
        for name in names:
            del self.by_name[name]
        return bool(names)


class Names(ModelNames):
    """With a resolver that finds every name that begins with `found`.

    asked   for which names, in which order
    gate    until it is set nothing is found
    """

    def __init__(self, llm, **settings):
        self.begun, self.asked, self.gate = [], [], asyncio.Event()
        self.gate.set()
        super().__init__(llm, ServerSettings("base", **settings), self.begun.append)

    async def _resolve(self, name, holder):
        self.asked.append(name)
        await self.gate.wait()
        if not name.startswith("found"):
            raise self._unknown(name, holder)
        self._serve(LoRARequest(name, stable_id(name), f"/adapters/{name}"))

    async def _allowed_path(self, path):
        await asyncio.sleep(0)  # as looking at a disk does
        return f"/allowed{path}"


def of(name, path=None, **changes):
    return LoRARequest(name, stable_id(name), path or f"/adapters/{name}", **changes)


def order(name, path="/x", **changes):
    return LoadAdapterRequest(lora_name=name, lora_path=path, **changes)


def status_of(error):
    return error.value.status


class TestAName:
    def test_of_the_base_model_is_no_adapters(self):
        async def main():
            return await Names(FakeLLM(), adapters=(of("sql"),)).find("base", ANYBODY)

        assert run(main()) is None

    def test_that_is_served_is_that_adapters_without_a_resolver(self):
        async def main():
            names = Names(FakeLLM(), adapters=(of("sql"), of("found")))
            return [await names.find(name, ANYBODY) for name in ("found", "sql")], names.asked

        assert run(main()) == ([of("found"), of("sql")], [])

    def test_that_is_not_served_is_looked_for_once_and_then_known(self):
        async def main():
            names = Names(FakeLLM())
            found = [await names.find("found it", ANYBODY) for _ in range(3)]
            return found, names.asked

        assert run(main()) == ([of("found it")] * 3, ["found it"])

    def test_that_many_ask_for_at_once_is_looked_for_once(self):
        async def main():
            names = Names(FakeLLM())
            names.gate.clear()
            tasks = [asyncio.ensure_future(names.find("found", ANYBODY)) for _ in range(5)]
            await asyncio.sleep(0.01)
            names.gate.set()
            return await asyncio.gather(*tasks), names.asked

        assert run(main()) == ([of("found")] * 5, ["found"])

    def test_that_takes_long_to_find_holds_up_no_other(self):
        async def main():
            names = Names(FakeLLM(), adapters=(of("sql"),))
            names.gate.clear()
            tasks = [asyncio.ensure_future(names.find(name, ANYBODY)) for name in ("found a", "found b")]
            await asyncio.sleep(0.01)
            served = await asyncio.wait_for(names.find("sql", ANYBODY), SOON)
            asked = list(names.asked)
            names.gate.set()
            return asked, served, await asyncio.gather(*tasks)

        assert run(main()) == (["found a", "found b"], of("sql"), [of("found a"), of("found b")])

    def test_that_no_resolver_knows_is_a_404_each_time_and_may_be_found_later(self):
        async def main():
            names = Names(FakeLLM())
            for _ in range(2):
                with pytest.raises(ApiError) as error:
                    await names.find("nowhere", ANYBODY)
                assert status_of(error) == 404 and "there are: base" in str(error.value)
            await names.load(order("nowhere"))
            return await names.find("nowhere", ANYBODY), names.asked

        assert run(main()) == (of("nowhere", "/allowed/x"), ["nowhere"] * 2)

    def test_that_is_read_again_is_still_found_at_once(self):
        async def main():
            llm = FakeLLM()
            names = Names(llm, adapters=(of("sql"),))
            llm.gate.clear()
            reload = asyncio.ensure_future(names.load(order("sql", "/new", load_inplace=True)))
            await asyncio.sleep(0.01)
            found = await asyncio.wait_for(names.find("sql", ANYBODY), SOON)
            llm.gate.set()
            await reload
            return found

        assert run(main()) == of("sql")

    def test_that_the_key_opens_is_found(self):
        async def main():
            names = Names(FakeLLM(), adapters=(of("sql"), of("dates")))
            return await names.find("sql", Holder(frozenset({"sql"})))

        assert run(main()) == of("sql")

    @pytest.mark.parametrize("name", ["base", "sql", "found it", "nowhere"])
    def test_that_the_key_does_not_open_is_a_403_without_a_look_up(self, name):
        async def main():
            names = Names(FakeLLM(), adapters=(of("sql"),))
            with pytest.raises(ApiError) as error:
                await names.find(name, Holder(frozenset({"dates"})))
            return status_of(error), names.asked

        assert run(main()) == (403, [])


class TestALoad:
    def test_is_served_once_the_engine_has_read_it(self):
        async def main():
            llm = FakeLLM()
            names = Names(llm)
            llm.gate.clear()
            loads = asyncio.ensure_future(names.load(order("sql", "/x")))
            await asyncio.sleep(0.01)
            assert llm.told == [("add", of("sql", "/allowed/x"))]
            assert names.served == {} and names.begun == []
            llm.gate.set()
            await loads
            return names.served, names.begun

        assert run(main()) == ({"sql": of("sql", "/allowed/x")}, ["sql"])

    def test_that_fails_changes_nothing(self):
        async def main():
            names = Names(FakeLLM(bad="/allowed/bad"))
            await names.load(order("sql", "/good"))
            before = dict(names.served)
            for name, again in (("dates", False), ("sql", True)):
                with pytest.raises(ValueError, match="is no adapter"):
                    await names.load(order(name, "/bad", load_inplace=again))
            return before, names.served, names.begun

        before, after, begun = run(main())
        assert before == after == {"sql": of("sql", "/allowed/good")}
        assert begun == ["sql"]

    @pytest.mark.parametrize("name", ["base", "sql", "brought"])
    def test_of_a_taken_name_is_a_400_before_the_engine_is_called(self, name):
        async def main():
            llm = FakeLLM()
            llm.by_name["brought"] = stable_id("brought")  # by a request that still runs
            names = Names(llm, adapters=(of("sql"),))
            with pytest.raises(ApiError) as error:
                await names.load(order(name))
            return status_of(error), llm.told, names.served

        assert run(main()) == (400, [], {"sql": of("sql")})

    def test_in_place_is_ordered_once(self):
        """Whoever asks for the name later must not have it read again."""

        async def main():
            llm = FakeLLM()
            names = Names(llm, adapters=(of("sql", "/old"),))
            await names.load(order("sql", "/new", load_inplace=True))
            return llm.told, await names.find("sql", ANYBODY)

        told, found = run(main())
        assert told == [("add", of("sql", "/allowed/new", load_inplace=True))]
        assert found == of("sql", "/allowed/new") and found.load_inplace is False

    def test_concurrent_with_another_of_the_name_is_refused_when_that_is_done(self):
        async def main():
            llm = FakeLLM()
            names = Names(llm)
            llm.gate.clear()
            loads = [asyncio.ensure_future(names.load(order("sql", path))) for path in ("/a", "/b")]
            await asyncio.sleep(0.01)
            llm.gate.set()
            results = await asyncio.gather(*loads, return_exceptions=True)
            return results, names.served, len(llm.told)

        (first, second), served, told = run(main())
        assert first is None and second.status == 400
        assert served == {"sql": of("sql", "/allowed/a")} and told == 1


class TestAnUnload:
    def test_takes_the_name_away_before_the_engine_has_done_it(self):
        """It may take as long as the longest answer."""

        async def main():
            llm = FakeLLM()
            names = Names(llm)
            await names.load(order("sql"))
            llm.gate.clear()
            unloads = asyncio.ensure_future(names.unload("sql"))
            await asyncio.sleep(0.01)
            assert names.served == {} and not unloads.done()
            llm.gate.set()
            await unloads
            return llm.told[1:], names.is_known("sql")

        assert run(main()) == ([("remove", stable_id("sql"))], False)

    def test_that_waits_lets_no_request_find_the_name_or_resolve_it(self):
        """Not even by a resolver, which finds this one: the engine would refuse it, or wait for ever with newcomers."""

        async def main():
            llm = FakeLLM()
            names = Names(llm, adapters=(of("found"),))
            llm.by_name["found"] = stable_id("found")
            llm.gate.clear()
            unloads = asyncio.ensure_future(names.unload("found"))
            await asyncio.sleep(0.01)
            with pytest.raises(ApiError) as error:
                await asyncio.wait_for(names.find("found", ANYBODY), SOON / 2)
            assert status_of(error) == 404 and "there are: base" in str(error.value)
            asked = list(names.asked)
            llm.gate.set()
            await unloads
            return asked, await names.find("found", ANYBODY)

        assert run(main()) == ([], of("found"))

    @pytest.mark.parametrize("in_place", [False, True])
    def test_that_waits_is_waited_for_by_a_load_of_the_name(self, in_place):
        """Else "already loaded" and "being unloaded" would be told of one adapter."""

        async def main():
            llm = FakeLLM()
            names = Names(llm)
            await names.load(order("sql", "/old"))
            llm.gate.clear()
            unloads = asyncio.ensure_future(names.unload("sql"))
            await asyncio.sleep(0.01)
            loads = asyncio.ensure_future(names.load(order("sql", "/new", load_inplace=in_place)))
            await asyncio.sleep(0.01)
            assert not unloads.done() and not loads.done() and names.served == {}
            llm.gate.set()
            await asyncio.gather(unloads, loads)
            return [what for what, _ in llm.told], await names.find("sql", ANYBODY)

        assert run(main()) == (["add", "remove", "add"], of("sql", "/allowed/new"))

    def test_that_waits_is_waited_for_by_another_which_finds_nothing_left(self):
        async def main():
            llm = FakeLLM()
            names = Names(llm, adapters=(of("sql"),))
            llm.gate.clear()
            unloads = [asyncio.ensure_future(names.unload("sql")) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not any(each.done() for each in unloads)
            llm.gate.set()
            return await asyncio.gather(*unloads, return_exceptions=True), llm.told

        (first, second), told = run(main())
        assert first is None and second.status == 404
        assert told == [("remove", stable_id("sql"))]

    def test_that_fails_leaves_the_name_to_be_found(self):
        """The engine has ended, say: nothing may be left of an unload that is over."""

        async def main():
            llm = FakeLLM()
            names = Names(llm, adapters=(of("found"),))
            llm.remove_lora = None  # whoever calls it gets a TypeError
            with pytest.raises(TypeError):
                await names.unload("found")
            return await names.find("found", ANYBODY)

        assert run(main()) == of("found")

    def test_of_an_unknown_name_is_a_404(self):
        async def main():
            llm = FakeLLM()
            with pytest.raises(ApiError) as error:
                await Names(llm, adapters=(of("sql"),)).unload("dates")
            assert "'dates'" in str(error.value)
            return status_of(error), llm.told

        assert run(main()) == (404, [])

    def test_reaches_what_only_the_engine_still_knows(self):
        async def main():
            llm = FakeLLM()
            llm.by_name["brought"] = stable_id("brought")
            await Names(llm).unload("brought")
            return llm.told, llm.by_name

        assert run(main()) == ([("remove", stable_id("brought"))], {})

    def test_waits_for_the_load_that_came_before_it(self):
        async def main():
            llm = FakeLLM()
            names = Names(llm)
            llm.gate.clear()
            loads = asyncio.ensure_future(names.load(order("sql")))
            await asyncio.sleep(0.01)
            unloads = asyncio.ensure_future(names.unload("sql"))
            await asyncio.sleep(0.01)
            llm.gate.set()
            await asyncio.gather(loads, unloads)
            return [what for what, _ in llm.told], names.served, llm.by_name

        assert run(main()) == (["add", "remove"], {}, {})


class TestWhatARequestGivesTheEngine:
    def test_is_the_bare_name_of_what_it_knows(self):
        async def main():
            llm = FakeLLM()
            names = Names(llm)
            await names.load(order("sql"))
            return [names.for_engine(adapter) for adapter in (of("sql", "/of/before"), of("found"), None)]

        assert run(main()) == ["sql", of("found"), None]

    def test_is_the_whole_request_of_what_is_served_and_it_does_not_know(self):
        """Memory was full when the adapter was found: the first request that has its turn brings it."""

        async def main():
            return Names(FakeLLM(), adapters=(of("sql"),)).for_engine(of("sql"))

        assert run(main()) == of("sql")

    def test_is_the_bare_name_of_what_it_knows_and_is_served_no_longer(self):
        """With its folder, the adapter that is being unloaded would come back for good."""

        async def main():
            llm = FakeLLM()
            names = Names(llm)
            await names.load(order("sql"))
            llm.gate.clear()
            unloads = asyncio.ensure_future(names.unload("sql"))
            await asyncio.sleep(0.01)
            named = names.served, names.for_engine(of("sql"))
            llm.gate.set()
            await unloads
            return named

        assert run(main()) == ({}, "sql")

    def test_is_the_whole_request_where_it_knows_no_adapters(self):
        async def main():
            return Names(FakeLLM(lora=False)).for_engine(of("sql"))

        assert run(main()) == of("sql")


# ---- with an engine ---------------------------------------------------------------------------------------------

PROMPT = [5, 6, 7, 8]
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def served(tmp_path):
    """Names of an engine, and folders of two adapters to load; nobody else has the names."""
    world = SmallWorld(tmp_path)
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(tmp_path / name, seed=seed)
    llm = AsyncLLM.from_engine(world.engine())
    names = ModelNames(llm, ServerSettings("base"), lambda name: None)
    yield names, lambda name: str(tmp_path / name)
    llm.shutdown()


async def ask(names, name, request_id, params=LONG):
    adapter = names.for_engine(await names.find(name, ANYBODY))
    async for output in names.llm.generate(PROMPT, params, request_id, adapter):
        yield output


async def tokens(names, name, request_id):
    return [output async for output in ask(names, name, request_id)][-1].outputs[0].token_ids


def test_a_request_in_flight_outlives_the_unload_and_newcomers_do_not(served):
    names, path = served

    async def main():
        await names.load(order("sql", path("one")))
        expected = await tokens(names, "sql", "alone")
        runs = ask(names, "sql", "in flight")
        await anext(runs)
        unloads = asyncio.ensure_future(names.unload("sql"))
        while not names.leaving:
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as error:
            await names.find("sql", ANYBODY)
        assert status_of(error) == 404
        await unloads
        loras = await names.llm.list_loras()
        in_flight = [output async for output in runs][-1].outputs[0].token_ids
        return expected, in_flight, loras

    expected, in_flight, loras = run_beside_an_engine(main())
    assert in_flight == expected and loras == set()


async def loaded_and_asked(names, path):
    """What adapters `one` and `two` answer; and a request of `sql`, with the weights of `one`, that has begun."""
    expected = {}
    for name in ("one", "two"):
        await names.load(order(name, path(name)))
        expected[name] = await tokens(names, name, name)
    assert expected["one"] != expected["two"]
    await names.load(order("sql", path("one")))
    runs = ask(names, "sql", "in flight")
    await anext(runs)
    return expected, runs


def test_the_name_may_be_loaded_at_once_behind_its_unload(served):
    names, path = served

    async def main():
        expected, runs = await loaded_and_asked(names, path)
        unloads = asyncio.ensure_future(names.unload("sql"))
        await asyncio.sleep(0)
        await names.load(order("sql", path("two")))
        assert unloads.done()
        later = await tokens(names, "sql", "later")
        return expected, [output async for output in runs][-1].outputs[0].token_ids, later

    expected, in_flight, later = run_beside_an_engine(main())
    assert (in_flight, later) == (expected["one"], expected["two"])


def test_a_reload_leaves_a_request_in_flight_its_weights_and_gives_others_the_new(served):
    names, path = served

    async def main():
        expected, runs = await loaded_and_asked(names, path)
        await names.load(order("sql", path("two"), load_inplace=True))
        later = asyncio.ensure_future(tokens(names, "sql", "later"))
        return expected, [output async for output in runs][-1].outputs[0].token_ids, await later

    expected, in_flight, later = run_beside_an_engine(main())
    assert (in_flight, later) == (expected["one"], expected["two"])
