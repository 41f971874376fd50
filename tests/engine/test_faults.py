"""What one request, one adapter or one step raises: it ends that one, and the others have the tokens of PEFT."""

import shutil

import pytest

from labs.kit.overlay import Todo
from minivllm import LoRARequest, SamplingParams
from minivllm.layers import sampler
from minivllm.text.detokenizer import IncrementalDetokenizer
from tests.oracles.invariants import check_engine
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.spoiled_adapters import fill

PROMPT = [5, 6, 7, 8, 9]


class PanicException(BaseException):
    """Named and derived like what pyo3 makes of a panic in a Rust library."""


# The first place where something is raised has both, the others the last one: no `except Exception` catches it.
FAULTS = [MemoryError(), PanicException("panicked")]


def tenants(engine, world, names=(None, "qv", "all"), length=6):
    for name in names:
        engine.add_request(str(name), PROMPT, greedy(length), lora_request=world.request(name))


def assert_served(world, outputs, names=(None, "qv", "all"), length=6):
    for name in names:
        assert tokens_of(outputs[str(name)]) == world.oracle().greedy(name, PROMPT, length), name


class TestOneRow:
    @pytest.mark.parametrize("error", FAULTS, ids=repr)
    def test_that_cannot_be_sampled_ends_alone(self, world, monkeypatch, error):
        """Its neighbours' rows are drawn once more then, and a seeded one has the tokens of its seed all the same."""
        engine, seeded = world.engine(), SamplingParams(seed=4, max_tokens=6, ignore_eos=True)
        engine.add_request("seeded", PROMPT, seeded)
        undisturbed = tokens_of(run(engine)["seeded"])
        weigh = sampler.token_weights

        def weights(logits, params):
            if params.temperature == 7:
                raise error
            return weigh(logits, params)

        monkeypatch.setattr(sampler, "token_weights", weights)
        tenants(engine, world)
        engine.add_request("seeded", PROMPT, seeded)
        engine.add_request("bad", PROMPT, SamplingParams(temperature=7), lora_request=world.request("qv"))

        outputs = run(engine)

        assert outputs["bad"].outputs[0].finish_reason == "error"
        assert type(error).__name__ in outputs["bad"].error
        assert tokens_of(outputs["seeded"]) == undisturbed
        assert_served(world, outputs)

    def test_whose_text_cannot_be_made_ends_alone_with_the_text_so_far(self, world, monkeypatch):
        error = PanicException("panicked")
        engine = world.llm().llm_engine
        update, calls = IncrementalDetokenizer.update, []

        def updated(self, *args, **kwargs):
            if self._params.max_tokens == 9:
                calls.append(self)
                if len(calls) == 3:
                    raise error
            return update(self, *args, **kwargs)

        monkeypatch.setattr(IncrementalDetokenizer, "update", updated)
        tenants(engine, world)
        engine.add_request("bad", PROMPT, greedy(9))

        outputs = run(engine)

        assert outputs["bad"].outputs[0].finish_reason == "error"
        assert type(error).__name__ in outputs["bad"].error
        assert len(outputs["bad"].outputs[0].text) == 2
        assert_served(world, outputs)

    @pytest.mark.parametrize(
        "error, is_logged", [(KeyError("weight"), True), (ValueError("half a pair"), False)]
    )
    def test_whose_text_cannot_be_made_keeps_the_error_and_one_that_nobody_foresaw_is_logged(
        self, world, monkeypatch, caplog, error, is_logged
    ):
        engine = world.llm().llm_engine

        def broken(*args, **kwargs):
            raise error

        monkeypatch.setattr(IncrementalDetokenizer, "update", broken)
        engine.add_request("bad", PROMPT, greedy(3))
        [request] = engine.scheduler.requests.values()

        [output] = engine.step()

        assert request.error == output.error
        assert str(error) in output.error
        traces = [record.exc_info[1] for record in caplog.records if record.exc_info]
        assert traces == ([error] if is_logged else [])

    def test_that_is_an_unsolved_exercise_is_raised(self, world, monkeypatch):
        engine = world.engine()
        engine.add_request("a", PROMPT, SamplingParams(temperature=7))

        def unsolved(logits, params):
            raise Todo("lab 9.9")

        monkeypatch.setattr(sampler, "token_weights", unsolved)
        with pytest.raises(Todo):
            engine.step()


class TestOneAdapter:
    def test_that_cannot_be_copied_into_its_slot_ends_its_requests_alone(self, world, monkeypatch):
        error = PanicException("panicked")
        engine = world.engine(max_loras=3)
        tenants(engine, world, [None, "qv", "all", "mlp"])
        wrapped = engine.adapters.manager.wrapped
        write, all_id = wrapped.write, world.request("all").lora_int_id

        def written(lora, slot):
            if lora.id == all_id:
                raise error
            write(lora, slot)

        monkeypatch.setattr(wrapped, "write", written)

        outputs = run(engine)

        assert type(error).__name__ in outputs["all"].error
        assert_served(world, outputs, [None, "qv", "mlp"])


class TestAPass:
    """Nothing of a step is committed before its pass is through, so the requests of the step end, and no other."""

    def test_that_fails_late_leaves_the_tokens_of_the_steps_before(self, world, monkeypatch):
        engine = world.engine()
        tenants(engine, world, length=6)
        for _ in range(3):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.model, "compute_logits", lambda *args: 1 / 0)
            ended = {output.request_id: output for output in engine.step()}

        assert ended.keys() == {"None", "qv", "all"}
        for name in (None, "qv", "all"):
            assert tokens_of(ended[str(name)]) == world.oracle().greedy(name, PROMPT, 6)[:3], name
        assert not engine.has_unfinished_requests()
        tenants(engine, world)
        assert_served(world, run(engine))

    def test_that_fails_leaves_no_other_rank_waiting_for_its_tokens(self, world, monkeypatch):
        engine, shared = world.engine(), []
        tenants(engine, world)
        monkeypatch.setattr(engine.executor, "share_tokens", lambda: shared.append(True))
        monkeypatch.setattr(engine.runner.model, "compute_logits", lambda *args: 1 / 0)

        engine.step()

        assert len(shared) == 1

    def test_that_fails_does_not_swallow_a_request_that_ended_before_the_pass(
        self, world, monkeypatch, tmp_path
    ):
        """A failed reload ends "new" while the step is prepared; then the pass fails and ends "base"."""
        engine = world.engine()
        folder = shutil.copytree(world.path("qv"), tmp_path / "mine")
        mine = LoRARequest("mine", 9, str(folder))
        engine.add_request("old", PROMPT, greedy(2), lora_request=mine)
        run(engine)
        engine.add_request("base", PROMPT, greedy(6))
        engine.add_request(
            "new", PROMPT, greedy(2), lora_request=LoRARequest("mine", 9, str(folder), load_inplace=True)
        )
        fill(folder, float("nan"))
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.model, "compute_logits", lambda *args: 1 / 0)
            outputs = {output.request_id: output for output in engine.step()}

        assert "NaN" in outputs["new"].error
        assert "ZeroDivisionError" in outputs["base"].error

    def test_that_fails_ends_a_request_for_several_answers_once_with_all_of_them(self, world, monkeypatch):
        engine = world.engine()
        engine.add_request("a", PROMPT, SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.model, "compute_logits", lambda *args: 1 / 0)
            [output] = engine.step()

        assert (output.request_id, output.finished) == ("a", True)
        assert [answer.finish_reason for answer in output.outputs] == ["error"] * 3
        assert "ZeroDivisionError" in output.error
        assert run(engine) == {}, "it ended a second time"
        check_engine(engine, [])
