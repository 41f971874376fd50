"""Calls of the engine that broke off: nobody waits for ever, loses words, or hears weights that were not promised."""

from contextlib import contextmanager

import pytest
from small_engine import SmallWorld, write_adapter
from tiny_engine import greedy, run, tokens_of

from minivllm import SamplingParams
from minivllm.guards.turns import Turns

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def world(tmp_path):
    return SmallWorld(tmp_path)


def answer(engine, lora, length=6, request_id="asked"):
    engine.add_request(request_id, PROMPT, greedy(length), lora_request=lora)
    return tokens_of(run(engine)[request_id])


@pytest.fixture
def expected(world, tmp_path_factory):
    """The tokens of an adapter of this seed, from an engine that nothing happened to."""

    def tokens(seed, length=6):
        other = SmallWorld(tmp_path_factory.mktemp("undisturbed"))
        return answer(other.engine(), other.request(seed) if seed else None, length)

    return tokens


def raise_once(monkeypatch, owner, name, error=KeyboardInterrupt):
    """The next call of a method raises, before it has done anything."""
    method, raised = getattr(owner, name), []

    def raising(*args, **kwargs):
        if not raised:
            raised.append(True)
            raise error
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, raising)


class RecordsThatBreakOff(dict):
    def __setitem__(self, key, value):
        raise KeyboardInterrupt


class TestAStep:
    def test_that_is_interrupted_on_its_way_out_tells_with_the_next_what_it_had_to_tell(
        self, world, monkeypatch, expected
    ):
        engine, heard, take = world.engine(), [], Turns.take
        engine.add_request("a", PROMPT, greedy(6))

        @contextmanager
        def interrupted(turns, **options):
            with take(turns, **options):
                yield
            monkeypatch.undo()
            raise KeyboardInterrupt

        heard += engine.step()
        monkeypatch.setattr(Turns, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while engine.has_unfinished_requests():
            heard += engine.step()

        assert [token for o in heard for token in o.outputs[0].delta_token_ids] == expected(0)
        assert tokens_of(heard[-1]) == expected(0)

    def test_that_is_interrupted_while_it_ends_its_requests_leaves_none_that_waits_for_ever(
        self, world, monkeypatch, expected
    ):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(6))
        with monkeypatch.context() as failing:
            failing.setattr(engine.runner, "launch_model", lambda scheduled: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
            raise_once(failing, engine, "_finish")
            with pytest.raises(KeyboardInterrupt):
                engine.step()

        outputs = run(engine)

        assert tokens_of(outputs["a"]) == expected(0)

    def test_whose_rows_were_told_to_the_layers_and_that_failed_then_is_not_taken_for_the_one_before(
        self, world, monkeypatch, expected
    ):
        """A step like the last one that was computed finds its rows in the backend, unless another has failed since."""
        engine = world.engine(enable_prefix_caching=False)
        engine.add_request("a", PROMPT, greedy(6), lora_request=world.request(1))
        engine.step()
        backend = engine.adapters.manager.punica_wrapper
        begin_step = backend.begin_step

        def failing(*args):
            begin_step(*args)
            monkeypatch.undo()
            raise RuntimeError("out of memory")

        monkeypatch.setattr(backend, "begin_step", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        engine.abort_request("a")

        assert answer(engine, world.request(1)) == expected(1)

    @pytest.mark.parametrize("n", [1, 2])
    def test_that_broke_off_at_its_end_keeps_the_ids_of_requests_whose_last_output_it_has(
        self, world, monkeypatch, expected, n
    ):
        engine = world.engine()
        drawn = SamplingParams(n=n, max_tokens=1, seed=3)
        engine.add_request("a", PROMPT, drawn)
        engine.add_request("b", PROMPT, greedy(6))
        raise_once(monkeypatch, engine.metrics, "observe_step", MemoryError)
        with pytest.raises(MemoryError):
            engine.step()

        assert engine.knows("a")
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            engine.add_request("a", PROMPT, greedy(2))

        outputs = run(engine)
        assert len(outputs["a"].outputs) == n and tokens_of(outputs["b"]) == expected(0)
        engine.add_request("a", PROMPT, greedy(6))
        assert tokens_of(run(engine)["a"]) == expected(0)

    @pytest.mark.parametrize("error", [MemoryError, RuntimeError], ids=lambda e: e.__name__)
    def test_before_which_the_mending_failed_is_mended_anew(self, world, monkeypatch, expected, error):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(6))
        raise_once(monkeypatch, engine.scheduler, "update_from_output")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        raise_once(monkeypatch, engine.scheduler, "add_request", error)
        with pytest.raises(error):
            engine.abort_request("nobody")

        outputs = run(engine)

        assert tokens_of(outputs["a"]) == expected(0)


@pytest.mark.parametrize("error", [MemoryError, RecursionError, KeyError], ids=lambda e: e.__name__)
def test_a_request_that_ran_out_of_memory_when_it_was_queued_is_not_in_the_engine(
    world, monkeypatch, expected, error
):
    engine = world.engine()
    engine.add_request("a", PROMPT, greedy(6))
    raise_once(monkeypatch, engine.output_processor, "add_states", error)
    with pytest.raises(error):
        engine.add_request("b", PROMPT, greedy(6), lora_request=world.request(1))

    outputs = run(engine)

    assert outputs.keys() == {"a"} and tokens_of(outputs["a"]) == expected(0)
    assert answer(engine, world.request(1), request_id="b") == expected(1)


class TestAReload:
    def test_that_failed_is_told_to_who_waited_though_the_telling_was_interrupted(
        self, world, monkeypatch, expected
    ):
        engine, adapter = world.engine(), world.request(1)
        engine.add_lora(adapter)
        engine.add_request("old", PROMPT, greedy(2), lora_request=adapter)
        engine.step()
        write_adapter(world.folder / "adapter1", seed=1, factor=float("nan"))
        engine.add_request("new", PROMPT, greedy(6), lora_request=world.request(1, load_inplace=True))
        fail = type(engine)._fail
        monkeypatch.setattr(engine, "_fail", lambda *args: monkeypatch.undo() or _interrupt())
        with pytest.raises(KeyboardInterrupt):
            run(engine)

        outputs = run(engine)

        assert type(engine)._fail is fail
        assert outputs["new"].error is not None and "NaN" in outputs["new"].error

    @pytest.mark.parametrize("remove", [False, True], ids=["reload", "unload"])
    def test_waits_for_a_request_whose_last_output_was_not_made(self, world, monkeypatch, expected, remove):
        engine, adapter, finished = world.engine(), world.request(1), {}
        for name in ("a", "b"):
            engine.add_request(name, PROMPT, greedy(6), lora_request=adapter)
        engine.step()
        write_adapter(world.folder / "adapter1", seed=2)
        if remove:
            engine.remove_lora(1)
        else:
            engine.add_lora(world.request(1, load_inplace=True))
        process = engine.output_processor.process

        def interrupted(request, logprobs=None):
            if request.request_id == "b" and request.is_finished:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return process(request, logprobs)

        monkeypatch.setattr(engine.output_processor, "process", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine)

        finished = run(engine)

        assert tokens_of(finished["a"]) == tokens_of(finished["b"]) == expected(1)
        assert answer(engine, adapter) == expected(2)

    def test_that_failed_is_forgotten_with_its_adapter(self, world, expected):
        engine, adapter = world.engine(), world.request(1)
        engine.add_lora(adapter)
        engine.add_request("old", PROMPT, greedy(6), lora_request=adapter)
        write_adapter(world.folder / "adapter1", seed=1, factor=float("nan"))
        engine.add_request("new", PROMPT, greedy(6), lora_request=world.request(1, load_inplace=True))
        engine.abort_request(["new", "old"])
        engine.remove_lora(1)
        write_adapter(world.folder / "adapter1", seed=1)
        engine.add_lora(adapter)

        write_adapter(world.folder / "adapter1", seed=2)

        assert answer(engine, world.request(1, load_inplace=True)) == expected(2)

    def test_whose_order_was_interrupted_lets_nobody_name_its_folder_and_get_the_old_weights(
        self, world, expected
    ):
        engine = world.engine()
        link = world.folder / "link"
        link.symlink_to(world.request(1).lora_path)
        engine.add_lora(world.request(1, lora_path=str(link)))
        link.unlink()
        link.symlink_to(world.request(2).lora_path)
        adapters = engine.adapters.adapters
        engine.adapters.adapters = RecordsThatBreakOff(adapters)
        with pytest.raises(KeyboardInterrupt):
            engine.add_lora(world.request(1, lora_path=str(link), load_inplace=True))
        engine.adapters.adapters = adapters

        with pytest.raises(ValueError, match="belongs to"):
            engine.add_request(
                "a", PROMPT, greedy(6), lora_request=world.request(1, lora_path=world.request(2).lora_path)
            )

        assert answer(engine, "adapter1") == expected(1)
        assert answer(
            engine, world.request(1, lora_path=str(link), load_inplace=True), request_id="c"
        ) == expected(2)

    def test_that_was_interrupted_twice_keeps_the_pin(self, world, monkeypatch, expected):
        engine = world.engine()
        engine.add_lora(world.request(1))
        engine.pin_lora(1)
        write_adapter(world.folder / "adapter1", seed=2)
        raise_once(monkeypatch, engine.adapters.manager, "pin_adapter")
        with pytest.raises(KeyboardInterrupt):
            engine.add_lora(world.request(1, load_inplace=True))

        tokens = answer(engine, world.request(1))

        assert tokens == expected(2)
        assert engine.adapters.manager.pinned_adapters == {1}


def test_an_unload_that_was_interrupted_is_done_by_the_next_call(world, monkeypatch, expected):
    engine = world.engine()
    engine.add_lora(world.request(1))
    raise_once(monkeypatch, engine.adapters.worker, "remove_adapter")
    with pytest.raises(KeyboardInterrupt):
        engine.remove_lora(1)
    write_adapter(world.folder / "adapter1", seed=2)

    engine.unpin_lora(3)

    assert engine.list_loras() == set()
    assert answer(engine, world.request(1)) == expected(2)


def test_an_adapter_that_was_being_dropped_is_read_anew_into_its_slot(world, monkeypatch, expected):
    engine = world.engine(max_loras=2, max_cpu_loras=2)
    for adapter_id in (1, 2):
        engine.add_lora(world.request(adapter_id))
    raise_once(monkeypatch, engine.adapters.manager._active_adapters, "pop")
    with pytest.raises(KeyboardInterrupt):
        engine.add_lora(world.request(3))
    write_adapter(world.folder / "adapter1", seed=4)

    assert answer(engine, world.request(1)) == expected(4)


# As PyTorch's "can't allocate memory" is: of the type by which the engine says that something cannot be done now.
ERRORS = [KeyboardInterrupt, MemoryError, RuntimeError, ValueError]
by_error = pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)


class TestAPin:
    @by_error
    @pytest.mark.parametrize("where", ["add_adapter", "pin_adapter", "tell"])
    def test_that_broke_off_is_no_pin(self, world, monkeypatch, expected, error, where):
        """Neither the registry nor the manager has it: with one slot pinned for nobody, one adapter fits no more."""
        engine = world.engine(max_loras=2)
        engine.add_lora(world.request(1))
        for adapter_id in (2, 3, 4, 5):
            engine.add_lora(world.request(adapter_id))
        assert 1 not in engine.list_loras()
        owner = engine.adapters.worker if where != "tell" else engine.adapters.manager
        if where == "tell":
            raise_at_event(monkeypatch, owner, "pin", error)
        else:
            raise_once(monkeypatch, owner, where, error)

        with pytest.raises(error):
            engine.pin_lora(1)

        assert not engine.adapters.manager.pinned_adapters and not engine.adapters.pinned
        for adapter_id in (2, 3):
            engine.add_request(str(adapter_id), PROMPT, greedy(6), lora_request=world.request(adapter_id))
        outputs = run(engine)
        assert tokens_of(outputs["2"]) == expected(2) and tokens_of(outputs["3"]) == expected(3)
        assert engine.pin_lora(1) and engine.adapters.manager.pinned_adapters == {1}

    def test_that_waited_and_broke_off_is_dropped_in_both_places(self, world, monkeypatch, caplog, expected):
        engine = world.engine(max_loras=2)
        engine.add_lora(world.request(2))
        for adapter_id in (1, 3):
            engine.add_request(str(adapter_id), PROMPT, greedy(6), lora_request=world.request(adapter_id))
        engine.step()
        engine.pin_lora(2)
        raise_at_event(monkeypatch, engine.adapters.manager, "pin", RuntimeError)

        outputs = run(engine)

        assert "could not be pinned" in caplog.text
        assert not engine.adapters.manager.pinned_adapters and not engine.adapters.pinned
        assert tokens_of(outputs["1"]) == expected(1) and tokens_of(outputs["3"]) == expected(3)

    def test_one_too_many_is_refused_and_disturbs_nobody(self, world, monkeypatch):
        engine = world.engine(max_loras=1)
        for adapter_id in (1, 2):
            engine.add_lora(world.request(adapter_id))
        engine.pin_lora(1)
        engine.add_request("a", PROMPT, greedy(6), lora_request=world.request(1))
        engine.step()
        blocks = engine.scheduler.requests["a"].block_ids

        with pytest.raises(RuntimeError, match="all 1 slots are pinned"):
            engine.pin_lora(2)
        engine.step()

        assert engine.scheduler.requests["a"].block_ids is blocks


@by_error
@pytest.mark.parametrize("where", ["finish_requests", "_finish"])
def test_an_abort_that_broke_off_leaks_nothing(world, monkeypatch, expected, error, where):
    engine = world.engine()
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPT, greedy(6), lora_request=world.request(1))
    engine.step()
    raise_once(monkeypatch, engine.scheduler, where, error)
    with pytest.raises(error):
        engine.abort_request(["a", "b"])

    outputs = run(engine)

    assert outputs.keys() == {"c"} and tokens_of(outputs["c"]) == expected(1)
    pool = engine.scheduler.kv_cache.block_pool
    assert pool.get_num_free_blocks() == pool.num_usable_blocks
    assert not engine.scheduler.requests and not engine.scheduler.in_flight


@by_error
def test_an_unload_that_broke_off_with_any_error_is_done_by_the_next_call(world, monkeypatch, error):
    engine = world.engine()
    engine.add_lora(world.request(1))
    raise_once(monkeypatch, engine.adapters.worker, "remove_adapter", error)
    with pytest.raises(error):
        engine.remove_lora(1)

    engine.unpin_lora(3)

    assert engine.list_loras() == set() and not engine.adapters.adapters


def test_an_engine_without_adapters_refuses_calls_about_them_and_disturbs_nobody(world):
    engine = world.engine(enable_lora=False)
    engine.add_request("a", PROMPT, greedy(6))
    engine.step()
    blocks = engine.scheduler.requests["a"].block_ids

    with pytest.raises(RuntimeError, match="LoRA is not enabled"):
        engine.add_lora(world.request(1))
    engine.step()

    assert engine.scheduler.requests["a"].block_ids is blocks


def raise_at_event(monkeypatch, manager, kind, error):
    """A listener raises when it hears of the next event of this kind."""
    tell, raised = manager.tell, []

    def telling(heard, *args, **more):
        if heard == kind and not raised:
            raised.append(True)
            raise error
        tell(heard, *args, **more)

    monkeypatch.setattr(manager, "tell", telling)


def _interrupt():
    raise KeyboardInterrupt
