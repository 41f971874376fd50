"""Reloads and unloads while requests run: what waits for whom, and what becomes of the rest (lab 7.5)."""

from types import MappingProxyType, SimpleNamespace

import pytest
from hand_made_steps import make_request
from torch import nn

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.output import RELOAD_PENDING
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.sampling_params import SamplingParams
from tests.worlds.small import SmallWorld

lab = pytest.mark.lab("7.5")


class OneLayer(nn.Module):
    """A model to be wrapped."""

    supports_lora = True
    packed_modules_mapping = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.proj = RowParallelLinear(4, 4, bias=False)


class NoFiles(AdapterSource):
    """A source whose adapters all fit: it looks at none of them."""

    def __init__(self, source):
        self.manager = source.manager

    def check(self, request):
        return LoRAModel(request.lora_int_id, 1, {})


class WordWorker(LRUCacheWorkerLoRAManager):
    """A worker manager whose disk is a dict of words: path -> weights. `memory` has id -> the weights that were read.

    An error on the disk is raised when it is read; `read` are the requests that it was read for, `in_use` is what the
    manager was told of at each reading.
    """

    def __init__(self):
        config = SimpleNamespace(
            lora_config=LoRAConfig(max_lora_rank=1, max_loras=2, max_cpu_loras=4),
            model_config=SimpleNamespace(get_vocab_size=lambda: 8),
            scheduler_config=SchedulerConfig(),
        )
        super().__init__(config, "cpu")
        self.create_lora_manager(OneLayer())
        self.read_through(NoFiles)
        self.disk, self.calls, self.read, self.in_use = {}, [], [], []
        self.words = {}

    @property
    def memory(self):
        return MappingProxyType({a: self.words[a] for a in self.manager.list_adapters()})

    def add_adapter(self, request):
        self.calls.append(f"read {request.lora_path}")
        self.read.append(request)
        self.in_use.append(self.manager.in_use)
        weights, adapter_id = self.disk[request.lora_path], request.lora_int_id
        if isinstance(weights, BaseException):
            raise weights
        if adapter_id not in self.memory:
            self.words[adapter_id] = weights
            self.manager.add_adapter(LoRAModel(adapter_id, 1, {}))
        elif request.load_inplace:
            self.words[adapter_id] = weights
            self.manager.replace_adapter(LoRAModel(adapter_id, 1, {}))
        return True

    def remove_adapter(self, adapter_id):
        self.calls.append(f"remove {adapter_id}")
        return super().remove_adapter(adapter_id)


class World:
    """A registry with a scheduler and a worker, with adapter 1 in memory, read from /one when it held "old"."""

    def __init__(self):
        self.worker = WordWorker()
        self.scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=50), LoRAConfig(max_loras=2))
        self.registry = AdapterRegistry(self.scheduler.queues, self.worker)
        self.worker.disk = {"/one": "old", "/two": "two"}
        self.registry.add_lora(self.lora(1))
        self.worker.calls.clear()
        self.worker.read.clear()

    def lora(self, adapter_id=1, **changes):
        path = {1: "/one", 2: "/two"}[adapter_id]
        return LoRARequest(path[1:], adapter_id, path, **changes)

    def ask(self, request_id, lora_request=None, running=True):
        """A new request of the adapter; its generation."""
        lora_request, generation = self.registry.register(
            lora_request or self.lora(), f"request '{request_id}'", {}
        )
        request = make_request(request_id, [1, 2], lora_request)
        request.adapter_generation = generation
        self.scheduler.add_request(request)
        if running:
            self.scheduler.waiting.remove(request, joins=True)
            self.scheduler.running.append(request)
            request.status = RequestStatus.RUNNING
        return generation

    def end(self, request_id):
        """The request has finished, and the engine says so."""
        [request] = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_STOPPED)
        self.registry.request_ended(request.adapter_id)

    def order_reload(self, request_id, weights="new"):
        """Other weights are on the disk, and a request asks for them; it waits. Its generation."""
        self.worker.disk["/one"] = weights
        return self.ask(request_id, self.lora(load_inplace=True), running=False)

    def may_run(self, generation):
        request = make_request("asks", [1], self.lora())
        request.adapter_generation = generation
        return self.registry.why_wait(request) is None


@pytest.fixture
def world():
    return World()


class TestUnload:
    @lab
    def test_of_an_idle_adapter_reaches_the_runner_at_once_and_frees_its_name(self, world):
        assert world.registry.remove_lora(1) is True

        assert world.worker.calls == ["remove 1"], (
            "the worker, which has the weights in a slot and in memory, was told nothing"
        )
        assert 1 not in world.registry.adapters, "the id is still taken"

    @lab
    def test_of_an_unknown_id_says_so_and_touches_nothing(self, world):
        assert world.registry.remove_lora(7) is False

        assert world.worker.calls == [], "nobody has such an adapter, so there is nothing to remove"

    @lab
    @pytest.mark.parametrize("running", [True, False], ids=["running", "waiting, or preempted"])
    def test_waits_for_a_request_in_flight(self, world, running):
        world.ask("a", running=running)

        assert world.registry.remove_lora(1) is True
        world.registry.settle()

        assert world.worker.calls == [], "request 'a' of adapter 1 is unfinished, and its weights are gone"

    @lab
    def test_is_done_when_the_last_of_its_requests_ends(self, world):
        world.ask("a")
        world.ask("b")
        world.ask("other", world.lora(2))
        world.registry.remove_lora(1)

        world.end("a")
        still_there = 1 in world.registry.adapters
        world.end("b")

        assert still_there, "request 'b' of adapter 1 is unfinished"
        assert world.worker.calls == ["remove 1"], (
            "both requests of adapter 1 have ended; 'other' has adapter 2"
        )
        assert set(world.registry.adapters) == {2}, "adapter 1 is unloaded, and adapter 2 stays"

    @lab
    def test_refuses_new_requests_while_it_waits(self, world):
        world.ask("a")

        world.registry.remove_lora(1)

        with pytest.raises(ValueError, match="is being unloaded"):
            world.registry.examine(world.lora())

    @lab
    def test_that_the_worker_fails_to_do_is_done_by_the_next_settling(self, world):
        """Promised: an id is free only when its weights are gone, or the next adapter under it would be served them."""
        remove = world.worker.remove_adapter

        def device_lost(adapter_id):
            raise RuntimeError("device lost")

        world.worker.remove_adapter = device_lost
        with pytest.raises(RuntimeError, match="device lost"):
            world.registry.remove_lora(1)

        with pytest.raises(ValueError, match="is being unloaded"):
            world.registry.examine(world.lora())
        world.worker.remove_adapter = remove
        world.registry.settle()
        assert world.worker.calls == ["remove 1"], "it was not removed, so the next settling removes it"
        assert (world.worker.memory, set(world.registry.adapters)) == ({}, set()), (
            "once it is removed nothing of it is left"
        )

    @lab
    def test_takes_back_what_was_noted_of_the_adapter(self, world):
        world.registry.pinned.add(1)

        world.registry.remove_lora(1)
        world.registry.add_lora(world.lora())

        assert world.registry.pinned == set(), "the next adapter with id 1 would be pinned"


@lab
def test_base_requests_may_always_run(world):
    world.ask("old")
    world.order_reload("new")

    assert world.registry.why_wait(make_request("base", [1])) is None


class PanicException(BaseException):
    """What a panic in a Rust library is, by its name."""


class TestReload:
    @lab
    def test_waits_for_requests_that_began_with_the_old_weights(self, world):
        world.ask("old")

        new = world.order_reload("new")
        world.registry.settle()

        assert world.worker.memory[1] == "old", "request 'old' is half-way through, with other weights by now"
        assert not world.may_run(new), "request 'new' may join, and would be served with the old weights"
        request = world.scheduler.requests["new"]
        assert world.registry.why_wait(request) == RELOAD_PENDING, (
            "request 'new' waits for the reload, and says so"
        )

    @lab
    @pytest.mark.parametrize("running", [True, False], ids=["running", "waiting, or preempted"])
    def test_is_done_when_the_last_request_before_it_ends_though_its_own_wait(self, world, running):
        old = world.ask("old", running=running)
        new = world.order_reload("new")
        before = dict(world.worker.memory)

        world.end("old")

        assert before == {1: "old"}, "the reload is done while request 'old' is half-way through"
        assert new > old, "requests of the new weights are told from those of the old by their generation"
        assert world.worker.memory == {1: "new"}, (
            "the requests that wait for a reload do not stand in its way"
        )
        assert world.may_run(new), "it is done, and its requests are still held back"

    @lab
    def test_happens_once(self, world):
        """Of an idle adapter, at the next settling."""
        new = world.order_reload("new")

        for _ in range(3):  # three steps
            world.registry.settle()

        assert world.worker.memory == {1: "new"}, "nobody is in the way of the reload, and it is not done"
        assert world.may_run(new), "the reload is done, and its request is still held back"
        assert world.worker.calls == ["read /one"], "one order, one reading"

    @lab
    def test_leaves_no_order_on_the_adapters_own_request(self, world):
        """What the engine keeps for the name is what every later request gets."""
        world.order_reload("new")
        world.registry.settle()

        request, _ = world.registry.register(world.lora(), "request 'later'", {})

        assert not request.load_inplace, "it would be read from disk for each request from now on"

    @lab
    def test_makes_those_who_come_after_it_wait_with_it(self, world):
        world.ask("old")
        new = world.order_reload("new")

        later = world.ask("later", running=False)

        assert later == new, "'later' came after the order, so it is of the new weights"

    @lab
    def test_ordered_twice_is_done_in_two_turns(self, world):
        world.ask("old")
        new = world.order_reload("new", "new")
        newer = world.order_reload("newer", "newer")

        world.end("old")
        first = world.may_run(new), world.may_run(newer)
        world.end("new")

        assert newer > new, "a second order begins another generation"
        assert first == (True, False), "request 'new' comes before the second reload"
        assert world.may_run(newer), "both reloads are done, and request 'newer' is still held back"
        assert world.worker.calls == ["read /one", "read /one"], (
            "two orders are two readings, each in its turn"
        )

    @lab
    def test_ordered_twice_and_due_at_once_is_done_in_order(self, world):
        """Whoever ordered the first has gone; the second must not be taken for done before it is."""
        orders = [world.lora(load_inplace=True, base_model_name=name) for name in ("first", "second")]
        world.ask("old")
        world.ask("new", orders[0], running=False)
        newer = world.ask("newer", orders[1], running=False)
        world.end("new")

        world.end("old")

        assert [request.base_model_name for request in world.worker.read] == ["first", "second"], (
            "two orders are two readings, the first one first"
        )
        assert world.may_run(newer), "both reloads are done, and request 'newer' is still held back"

    @lab
    def test_waits_for_requests_of_its_own_adapter_only_and_evicts_none_of_others(self, world):
        world.ask("other", world.lora(2))

        world.order_reload("new")
        world.registry.settle()

        assert world.worker.memory[1] == "new", "'other' has adapter 2"
        assert world.worker.in_use[-1] == {2}, "what the manager thinks is in use is of the last step"

    @lab
    def test_of_what_is_not_in_memory_is_left_to_the_step_that_needs_it(self, world):
        """Memory may be full of adapters that run; a step waits for room, this would raise."""
        world.worker.manager.remove_all_adapters()
        new = world.order_reload("new")

        world.registry.settle()

        assert world.worker.calls == [], "it is not in memory, so there is nothing to read again yet"
        assert world.may_run(new), "the step that reads it reads what is there by then, so nobody has to wait"

    @lab
    def test_tells_new_requests_what_the_new_weights_ask_of_their_prompts(self, world):
        found = {"scaling_factor": 4.0}
        world.registry.register(world.lora(load_inplace=True), "request 'new'", found)

        entry = world.registry.adapters[1]
        assert world.registry.examine(world.lora()) == entry.found == found

    @lab
    def test_is_ordered_in_a_copy_of_the_record(self, world):
        """Promised: the record in use is as it was, with what is in it, until the copy takes its place."""
        world.ask("old")
        first = world.order_reload("new")
        record, order = world.registry.adapters[1], world.lora(load_inplace=True)
        before = record.generation, dict(record.reloads)

        made = world.registry._with_reload(record, order)

        assert (made.generation, made.reloads) == (first + 1, {**before[1], first + 1: order}), (
            "the copy has one generation more, and the order beside those that the record has"
        )
        assert (record.generation, record.reloads) == before, "generation and orders of the record in use"

    @lab
    def test_whose_order_is_cut_short_was_not_ordered(self, world):
        class Interrupted(dict):
            def __setitem__(self, key, value):
                raise KeyboardInterrupt

        before = world.ask("before")
        adapters = world.registry.adapters
        world.registry.adapters = Interrupted(adapters)
        with pytest.raises(KeyboardInterrupt):
            world.order_reload("new")
        world.registry.adapters = adapters

        after = world.ask("after", running=False)
        world.end("before")

        assert after == before, "the adapter has a generation more, and nobody was promised one"
        assert world.worker.calls == [], "nobody was promised other weights, and they were read"

    @lab
    def test_then_an_unload_are_both_done_when_their_turn_comes(self, world):
        world.ask("old")
        new = world.order_reload("new")
        world.registry.remove_lora(1)

        world.end("old")
        read_again = world.worker.memory == {1: "new"} and world.may_run(new)
        world.end("new")

        assert read_again, "'new' was accepted before the unload, and waits for its weights"
        assert world.worker.memory == {}, "what was read is gone with its adapter"
        assert world.registry.adapters == {}, "its record is gone, too"


class TestReloadThatFails:
    @pytest.fixture
    def error(self):
        return ValueError("adapter 'one': lora_B has NaN")

    @lab
    @pytest.mark.parametrize(
        "error",
        [
            *(ValueError("NaN"), OSError("gone"), RuntimeError("full"), MemoryError(), KeyError("weight")),
            PanicException("out of range"),
        ],
        ids=lambda e: type(e).__name__,
    )
    def test_is_not_raised_at_whoever_ends_a_request_but_kept_for_those_who_waited(self, world, error):
        world.ask("old")
        new = world.order_reload("new", weights=error)

        world.end("old")

        assert world.registry.failures() == {(1, new): error}, (
            "the error is kept for the requests of that reload"
        )
        assert world.worker.memory == {1: "old"}, "the adapter that served until now is gone"

    @lab
    def test_is_kept_under_its_own_generation(self, world, error):
        world.order_reload("first", weights="first")
        world.registry.settle()
        world.end("first")

        second = world.order_reload("second", weights=error)
        world.registry.settle()

        assert second != 1, "the adapter has the id 1; a generation of 1 would prove nothing"
        assert world.registry.failures() == {(1, second): error}, "the error is that of the second reload"

    @lab
    def test_does_not_concern_whoever_comes_after(self, world, error):
        failed = world.order_reload("new", weights=error)
        world.registry.settle()

        later = world.ask("later", running=False)
        waits_for_them = not world.may_run(later)
        world.end("new")

        assert later > failed, "a request that came after the failure is ended with those who waited for it"
        assert waits_for_them, "'new' is of an earlier generation, and unfinished"
        assert world.may_run(later), "whoever comes after a failed reload goes on with the old weights"

    @lab
    def test_does_not_concern_the_reloads_after_it(self, world, error):
        world.ask("old")
        failed = world.order_reload("new", weights=error)
        world.order_reload("newer", weights=error)
        newest = world.order_reload("newest", weights=error)
        world.end("old")
        world.worker.disk["/one"] = "newest"
        failures = world.registry.failures()

        later = world.ask("later", running=False)

        assert list(failures) == [(1, failed)], "one reload has failed, and is told"
        assert later == newest, "whoever comes now comes after the last order"
        world.end("new")
        world.end("newer")
        assert world.worker.memory == {1: "newest"}, "the reload after the failed one is done"

    @lab
    def test_leaves_the_adapter_known_by_the_folder_that_serves(self, world, error):
        world.worker.disk["/bad"] = error
        bad = LoRARequest("bad", 1, "/bad", load_inplace=True)
        world.ask("new", bad, running=False)

        world.registry.settle()

        assert world.registry.adapters[1].request.lora_path == "/one", "nothing was read from /bad"
        world.registry.examine(world.lora())  # else who names it is refused
        with pytest.raises(ValueError, match="lora_int_id 1 belongs to adapter 'one' at '/one'"):
            world.registry.examine(LoRARequest("bad", 1, "/bad"))

    @lab
    def test_goes_back_to_no_folder_that_a_reload_has_replaced(self, world, error):
        world.ask("new", LoRARequest("two", 1, "/two", load_inplace=True), running=False)
        world.registry.settle()
        world.end("new")
        world.worker.manager.remove_all_adapters()

        world.registry.could_not_be_read(1)

        assert 1 not in world.registry.adapters, (
            "/two cannot be read any more, and requests would get what /one held before the reload"
        )

    @lab
    def test_that_is_cut_short_is_done_by_the_next_settling(self, world):
        new = world.order_reload("new", weights=KeyboardInterrupt())

        with pytest.raises(KeyboardInterrupt):
            world.registry.settle()

        assert not world.may_run(new), "requests that were promised other weights would get the old ones"
        world.worker.disk["/one"] = "new"
        world.registry.settle()
        assert world.worker.memory == {1: "new"}, "the reload that was cut short is done by the next settling"
        assert world.may_run(new), "it is done, and its request is still held back"


class TestThroughTheEngine:
    """With a model, slots and a scheduler."""

    @lab
    def test_an_unloaded_adapter_is_in_no_slot_and_not_in_memory(self, tmp_path):
        world = SmallWorld(tmp_path)
        engine = world.engine()
        params = SamplingParams(temperature=0, max_tokens=4)
        engine.add_request("a", [5, 6, 7], params, lora_request=world.request(1))
        engine.step()
        in_slots = engine.debug_info()["slots"]

        engine.remove_lora(1)
        while engine.has_unfinished_requests():
            engine.step()

        assert 1 in in_slots
        assert engine.debug_info()["slots"] == [None, None]
        assert engine.list_loras() == set()
