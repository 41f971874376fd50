"""What adds, removes or pins an adapter below an engine leads to the engine, or names the call to make."""

import pytest

from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.worker.model_runner import ModelRunner
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.small import SmallWorld

PROMPT = [5, 6, 7, 8, 9, 10]

ADD = {
    "the runner": lambda engine: engine.runner.add_lora,
    "the runner, as documents call it": lambda engine: engine.model_runner.add_lora,
    "the worker's manager": lambda engine: engine.runner.lora_manager.add_adapter,
}
REMOVE = {
    "the runner": lambda engine: engine.runner.remove_lora,
    "the worker's manager": lambda engine: engine.runner.lora_manager.remove_adapter,
    "the model's manager": lambda engine: engine.runner.lora_manager.manager.remove_adapter,
    "all of the worker's": lambda engine: lambda _: engine.runner.lora_manager.remove_all_adapters() or True,
    "all of the model's": (
        lambda engine: lambda _: engine.runner.lora_manager.manager.remove_all_adapters() or True
    ),
}
PIN = {
    "the runner": lambda engine: engine.runner.pin_lora,
    "the worker's manager": lambda engine: engine.runner.lora_manager.pin_adapter,
    "the model's manager": lambda engine: engine.runner.lora_manager.manager.pin_adapter,
    "the name that vLLM's worker has for it": (
        lambda engine: engine.runner.lora_manager._adapter_manager.pin_adapter
    ),
}


def through(doors):
    return pytest.mark.parametrize("door", doors.values(), ids=list(doors))


def answers(engine, **requests):
    """Request id -> tokens, of requests that are all there at once."""
    for request_id, lora_request in requests.items():
        engine.add_request(request_id, PROMPT, greedy(5), lora_request=lora_request)
    outputs = run(engine)
    assert {output.error for output in outputs.values()} == {None}
    return {request_id: tokens_of(output) for request_id, output in outputs.items()}


def expected(world, **names):
    return {request_id: world.oracle().greedy(name, PROMPT, 5) for request_id, name in names.items()}


@through(ADD)
class TestAdd:
    def test_gives_the_id_to_that_adapter_and_refuses_another_one(self, world, door):
        engine, mine = world.engine(), world.request("qv")

        assert door(engine)(mine) is True

        assert engine.has_lora(1) and engine.list_loras() == {1}
        with pytest.raises(ValueError, match=r"lora_int_id 1 belongs to adapter 'qv' .*\(add_lora\)"):
            engine.add_request("b", PROMPT, greedy(), lora_request=world.request("all", lora_int_id=1))
        assert answers(engine, a=mine) == expected(world, a="qv")

    def test_of_what_is_no_request_says_so(self, world, door):
        with pytest.raises(TypeError, match="lora_request must be LoRARequest, got 'qv'"):
            door(world.engine())("qv")

    def test_in_the_middle_of_a_step_is_refused_and_the_step_goes_on(self, world, door):
        engine, refusals = world.engine(), []

        def listen(_):
            with pytest.raises(RuntimeError, match="in the middle of another call") as refusal:
                door(engine)(world.request("qv"))
            refusals.append(refusal)

        engine.listeners.append(listen)

        assert answers(engine, a=world.request("all")) == expected(world, a="all")
        assert refusals and engine.list_loras() == {world.request("all").lora_int_id}


@through(REMOVE)
def test_a_removal_waits_for_requests_in_flight_and_frees_the_id(world, door):
    engine, mine = world.engine(), world.request("qv")
    engine.add_request("a", PROMPT, greedy(5), lora_request=mine)
    engine.step()

    assert door(engine)(1) is True

    with pytest.raises(ValueError, match="is being unloaded"):
        engine.add_request("b", PROMPT, greedy(), lora_request=mine)
    assert tokens_of(run(engine)["a"]) == world.oracle().greedy("qv", PROMPT, 5)
    assert engine.list_loras() == set() and not engine.has_lora(1)
    assert answers(engine, c=world.request("all", lora_int_id=1)) == expected(world, c="all")


@through(PIN)
class TestPin:
    def test_keeps_the_slot_while_others_take_turns_on_the_one_that_is_left(self, world, door):
        engine = world.engine(max_loras=2)
        for name in ("qv", "all", "mlp"):
            engine.add_lora(world.request(name))

        assert door(engine)(1) is True

        found = answers(engine, a=world.request("all"), b=world.request("mlp"), c=None)
        assert found == expected(world, a="all", b="mlp", c=None)
        assert engine.adapters.pinned == {1} and 1 in engine.adapters.manager.lora_index_to_id


class TestTheModelsManager:
    @pytest.fixture
    def engine(self, tmp_path):
        self.world = SmallWorld(tmp_path)
        engine = self.world.engine()
        engine.add_lora(self.world.request(1))
        return engine

    def test_lets_a_pin_go_by_the_engine(self, engine):
        manager = engine.runner.lora_manager.manager
        engine.pin_lora(1)

        assert manager.unpin_adapter(1) is True and manager.unpin_adapter(1) is False

        assert engine.adapters.pinned == set() == manager.pinned_adapters

    def test_leaves_a_pinned_adapter_in_its_slot(self, engine):
        manager = engine.runner.lora_manager.manager
        engine.pin_lora(1)

        with pytest.raises(RuntimeError, match=r"adapter 1 is pinned.*call engine.unpin_lora\(1\) first"):
            manager.deactivate_adapter(1)

        assert manager.list_active_adapters() == {1: 0}

    def test_takes_another_one_out_until_a_step_needs_it(self, engine):
        manager = engine.runner.lora_manager.manager
        before = answers(engine, a=self.world.request(1))

        assert manager.deactivate_adapter(1) is True

        assert manager.list_active_adapters() == {}
        assert answers(engine, a=self.world.request(1)) == before

    @pytest.mark.parametrize("method", ["add_adapter", "replace_adapter"])
    def test_takes_no_weights_without_a_request(self, engine, method):
        manager = engine.runner.lora_manager.manager

        with pytest.raises(
            RuntimeError, match=r"^adapter 1 cannot be .* call engine.add_lora with a LoRARequest"
        ):
            getattr(manager, method)(manager.get_adapter(1))

    def test_answers_whatever_changes_nothing_and_lets_nothing_be_set(self, engine):
        shown, real = engine.runner.lora_manager.manager, engine.adapters.manager

        assert shown.lora_index_to_id == real.lora_index_to_id == [1, None]
        assert shown.get_free_slots() == [1] and len(shown) == 1 and shown.stats is real.stats
        with pytest.raises(AttributeError):
            shown.in_use = frozenset({1})
        with pytest.raises(RuntimeError, match=r"call engine.pin_lora$"):
            shown.set_in_use({1})


class TestTheWorkersManager:
    @pytest.fixture
    def engine(self, tmp_path):
        self.world = SmallWorld(tmp_path)
        return self.world.engine()

    @pytest.mark.parametrize("method", ["set_active_adapters", "prepare_adapters"])
    def test_reads_no_adapter_that_requests_may_not_name(self, engine, method):
        shown, mapping = engine.runner.lora_manager, [None] * (method == "set_active_adapters")
        engine.add_lora(self.world.request(1))

        with pytest.raises(
            RuntimeError, match=r"adapter 'adapter2' \(id 2\) is not registered; call engine.add_lora"
        ):
            getattr(shown, method)([self.world.request(1), self.world.request(2)], *mapping)

        assert engine.list_loras() == {1}
        getattr(shown, method)([self.world.request(1), None], *mapping)

    def test_takes_no_adapter_of_zeros(self, engine):
        with pytest.raises(RuntimeError, match=r"adapter 'adapter1' of zeros cannot be added.*warm_up=True"):
            engine.runner.lora_manager.add_dummy_lora(self.world.request(1), 4)

        assert engine.list_loras() == set()


class TestADummyRun:
    @pytest.fixture
    def engine(self, tmp_path):
        self.world = SmallWorld(tmp_path)
        return self.world.engine()

    def test_takes_no_id_of_the_engines_adapters(self, engine):
        engine.add_lora(self.world.request(1))

        with pytest.raises(RuntimeError, match=r"take the ids of the engine's own \(in memory: \[1\]\)"):
            engine.runner.warm_up()

        assert engine.list_loras() == {1}

    def test_leaves_no_adapter_that_nobody_has_registered(self, engine):
        lora_config = engine.config.lora_config

        with (
            pytest.raises(RuntimeError, match="let remove_lora be True"),
            engine.runner.maybe_setup_dummy_loras(lora_config, remove_lora=False),
        ):
            pass

        with engine.runner.maybe_setup_dummy_loras(lora_config):
            assert engine.list_loras() == {1, 2}
        assert engine.list_loras() == set()


def test_a_runner_by_itself_keeps_its_doors(tmp_path):
    world = SmallWorld(tmp_path)
    runner = ModelRunner(world.engine().config)

    assert runner.add_lora(world.request(1)) and runner.pin_lora(1)

    manager = runner.lora_manager.manager
    assert type(runner.lora_manager) is LRUCacheWorkerLoRAManager and manager.pinned_adapters == {1}
    assert manager.replace_adapter(manager.get_adapter(1)) is None and manager.deactivate_adapter(1)
    assert runner.remove_lora(1) and runner.list_loras() == set()
