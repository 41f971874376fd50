"""Loads, reloads, unloads and pins while requests run: each is done once nothing stands in its way, and never
later; what fails is told to those who asked for it.
"""

import shutil
from dataclasses import replace

import pytest

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run, tokens_of
from tests.worlds.spoiled_adapters import edit_weights, fill

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def folder(world, tmp_path):
    """A copy of adapter 'qv' that a test may change."""
    return shutil.copytree(world.path("qv"), tmp_path / "mine")


def rewrite(folder, change):
    """Save other weights in place of the folder's."""
    edit_weights(folder, lambda weights: {name: change(weight) for name, weight in weights.items()})


def negate(folder):
    rewrite(folder, lambda weight: -weight if weight.shape[0] > weight.shape[1] else weight)


def steps(engine, count):
    return [output for _ in range(count) for output in engine.step()]


def policy(world, step, tenant, **changes):
    """As a trainer's next policy comes: the same id, another name and another folder."""
    return LoRARequest(f"policy-{step}", 9, str(world.path(tenant)), **changes)


def test_an_unload_needs_no_further_step_once_the_last_request_is_aborted(world):
    engine = world.engine()
    engine.add_request("a", PROMPT, greedy(3), lora_request=world.request("qv"))
    engine.step()
    engine.remove_lora(1)

    engine.abort_request("a")

    assert engine.list_loras() == set()
    assert not engine.has_unfinished_requests()


class TestReload:
    @pytest.fixture
    def request_of(self, folder):
        return lambda **changes: LoRARequest("mine", 1, str(folder), **changes)

    @pytest.fixture
    def answer_of(self, world, folder):
        """The oracle's answer with what is in the folder now."""

        def answer(count):
            oracle = world.oracle()
            oracle.load("now", folder)
            tokens = oracle.greedy("now", PROMPT, count)
            oracle.forget("now")
            return tokens

        return answer

    def test_old_requests_keep_the_old_weights_and_new_ones_get_the_new(
        self, world, folder, request_of, answer_of
    ):
        engine = world.engine()
        old_answer = answer_of(8)
        engine.add_request("old", PROMPT, greedy(8), lora_request=request_of())
        outputs = steps(engine, 3)
        negate(folder)

        engine.add_request("new", PROMPT, greedy(8), lora_request=request_of(load_inplace=True))
        engine.add_request("later", PROMPT, greedy(8), lora_request=request_of())

        outputs = run(engine)
        new_answer = answer_of(8)
        assert old_answer != new_answer
        assert tokens_of(outputs["old"]) == old_answer
        assert tokens_of(outputs["new"]) == tokens_of(outputs["later"]) == new_answer

    def test_happens_when_the_requests_before_it_are_aborted(self, world, folder, request_of, answer_of):
        engine = world.engine()
        engine.add_request("old", PROMPT, greedy(8), lora_request=request_of())
        engine.step()
        negate(folder)
        engine.add_request("new", PROMPT, greedy(8), lora_request=request_of(load_inplace=True))
        engine.step()

        engine.abort_request("old")

        assert tokens_of(run(engine)["new"]) == answer_of(8)

    @pytest.mark.parametrize("call", ["add_lora", "reload", "remove_lora", "pin_lora"])
    def test_that_fails_inside_another_call_is_told_to_its_own_requests(
        self, world, folder, request_of, call
    ):
        engine = world.engine()
        engine.add_lora(world.request("all"))
        engine.add_request("old", PROMPT, greedy(3), lora_request=request_of())
        engine.step()
        fill(folder, float("nan"))
        engine.add_request("new", PROMPT, greedy(3), lora_request=request_of(load_inplace=True))
        while "old" in engine.scheduler.requests:
            engine.step()

        {
            "add_lora": lambda: engine.add_lora(world.request("mlp")),
            "reload": lambda: engine.add_lora(world.request("all", load_inplace=True)),
            "remove_lora": lambda: engine.remove_lora(2),
            "pin_lora": lambda: engine.pin_lora(2),
        }[call]()

        assert run(engine)["new"].outputs[0].finish_reason == "error"

    def test_pending_for_an_adapter_that_cannot_be_read_is_dropped_with_it(self, world, folder, request_of):
        engine = world.engine(max_loras=1, max_cpu_loras=1)
        engine.add_lora(request_of())
        engine.add_request("other", PROMPT, greedy(3), lora_request=world.request("all"))
        engine.step()
        engine.add_request("old", PROMPT, greedy(3), lora_request=request_of())
        engine.add_request("new", PROMPT, greedy(3), lora_request=request_of(load_inplace=True))
        good = folder.rename(folder.with_name("moved"))
        engine.abort_request("other")

        outputs = run(engine)

        assert [outputs[i].outputs[0].finish_reason for i in ("old", "new")] == ["error", "error"]
        good.rename(folder)
        engine.add_request("x", PROMPT, greedy(6), lora_request=world.request("mlp", lora_int_id=1))
        assert tokens_of(run(engine)["x"]) == world.oracle().greedy("mlp", PROMPT, 6)

    def test_of_one_generate_call_is_one_however_many_prompts_it_has(self, world):
        llm = world.llm()
        prompts = [{"prompt_token_ids": [*PROMPT, last]} for last in range(5, 9)]

        answers = llm.generate(
            prompts, greedy(4), use_tqdm=False, lora_request=world.request("qv", load_inplace=True)
        )

        assert llm.llm_engine.get_metrics()["lora"]["loads"] == 1
        assert len(llm.llm_engine.trace) == 4, "the prompts waited for each other"
        for prompt, answer in zip(prompts, answers):
            expected = world.oracle().greedy("qv", prompt["prompt_token_ids"], 4)
            assert tokens_of(answer) == expected


class TestAReloadFromAnotherFolder:
    """As a trainer's next policy comes: the same id, a new name and a new folder (vLLM's load_inplace)."""

    def test_serves_the_new_folder_under_the_new_name(self, world):
        engine = world.engine()
        engine.add_request("old", PROMPT, greedy(6), lora_request=policy(world, 1, "qv"))
        steps(engine, 2)

        new = policy(world, 2, "all", load_inplace=True)
        engine.add_request("new", PROMPT, greedy(6), lora_request=new)
        engine.add_request("by name", PROMPT, greedy(6), lora_request="policy-2")
        engine.add_request("later", PROMPT, greedy(6), lora_request=policy(world, 2, "all"))

        outputs = run(engine)
        assert tokens_of(outputs["old"]) == world.oracle().greedy("qv", PROMPT, 6)
        for request_id in ("new", "by name", "later"):
            assert tokens_of(outputs[request_id]) == world.oracle().greedy("all", PROMPT, 6)
        assert engine.list_loras() == {9}

    def test_frees_the_old_name_and_refuses_the_old_folder(self, world):
        engine = world.engine()
        engine.add_lora(policy(world, 1, "qv"))

        engine.add_lora(policy(world, 2, "all", load_inplace=True))

        with pytest.raises(ValueError, match="adapter 'policy-1' is unknown"):
            engine.add_request("a", PROMPT, greedy(2), lora_request="policy-1")
        with pytest.raises(ValueError, match="lora_int_id 9 belongs to adapter 'policy-2'"):
            engine.add_request("a", PROMPT, greedy(2), lora_request=policy(world, 1, "qv"))
        engine.add_lora(LoRARequest("policy-1", 10, str(world.path("mlp"))))
        engine.add_request("a", PROMPT, greedy(4), lora_request="policy-1")
        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("mlp", PROMPT, 4)

    def test_under_its_old_name_keeps_all_its_names(self, world):
        engine = world.engine()
        engine.add_lora(policy(world, 1, "qv"))
        engine.add_lora(LoRARequest("alias", 9, str(world.path("qv"))))

        engine.add_lora(LoRARequest("policy-1", 9, str(world.path("all")), load_inplace=True))

        for name in ("policy-1", "alias"):
            engine.add_request(name, PROMPT, greedy(4), lora_request=name)
        outputs = run(engine)
        assert tokens_of(outputs["policy-1"]) == tokens_of(outputs["alias"])
        assert tokens_of(outputs["alias"]) == world.oracle().greedy("all", PROMPT, 4)


def test_debug_info_has_one_state_for_each_adapter(world, folder):
    engine = world.engine(max_loras=1, max_cpu_loras=2)
    mine = LoRARequest("mine", 7, str(folder))
    for request in (world.request("qv"), world.request("mlp"), world.request("all"), mine):
        engine.add_lora(request)
    engine.add_request("a", PROMPT, greedy(9), lora_request=mine)
    engine.step()
    told = [engine.debug_info()["states"]]

    engine.add_request("b", PROMPT, greedy(9), lora_request=replace(mine, load_inplace=True))
    told.append(engine.debug_info()["states"]["mine"])
    engine.remove_lora(7)
    told.append(engine.debug_info()["states"]["mine"])

    assert told[0] == {"qv": "known", "mlp": "known", "all": "in memory", "mine": "in a slot"}
    assert told[1:] == ["reloading", "leaving"]


class TestPin:
    def test_ends_with_the_adapter(self, world):
        engine = world.engine()
        engine.add_lora(world.request("qv"))
        engine.pin_lora(1)
        engine.remove_lora(1)

        engine.add_request("after", [5, 6, 7], greedy(3), lora_request=world.request("all"))

        assert tokens_of(run(engine)["after"]) == world.oracle().greedy("all", [5, 6, 7], 3)

    @pytest.mark.parametrize("memory", [4, 2], ids=["a slot is lacking", "room in memory is, too"])
    def test_of_a_third_adapter_while_two_run_takes_the_next_slot_there_is(self, world, memory):
        engine = world.engine(max_loras=2, max_cpu_loras=memory)
        engine.add_lora(world.request("mlp"))
        for name in ("qv", "all"):
            engine.add_request(name, PROMPT, greedy(12), lora_request=world.request(name))
        engine.step()

        engine.pin_lora(3)

        outputs = run(engine)
        assert 3 in engine.adapters.manager.lora_index_to_id
        assert engine.debug_info()["pinned"] == [3]
        for name in ("qv", "all"):
            assert tokens_of(outputs[name]) == world.oracle().greedy(name, PROMPT, 12)

    def test_that_waits_for_a_slot_is_not_lost_with_the_adapters_memory(self, world):
        engine = world.engine(max_loras=2, max_cpu_loras=3)
        engine.add_lora(world.request("mlp"))
        for name in ("qv", "all"):
            engine.add_request(name, PROMPT, greedy(12), lora_request=world.request(name))
        engine.step()
        engine.pin_lora(3)

        with pytest.raises(RuntimeError, match="memory"):
            engine.add_lora(world.request("patterns"))

        run(engine)
        assert engine.debug_info()["pinned"] == [3]

    def test_of_an_adapter_that_cannot_be_read_in_the_end_is_dropped(self, world, folder, caplog):
        engine = world.engine(max_loras=2, max_cpu_loras=2)
        engine.add_lora(LoRARequest("mine", 5, str(folder)))
        for name in ("all", "mlp"):
            engine.add_request(name, PROMPT, greedy(6), lora_request=world.request(name))
        engine.step()
        engine.pin_lora(5)
        shutil.rmtree(folder)

        outputs = run(engine)

        assert "'mine' could not be pinned" in caplog.text
        assert engine.debug_info()["pinned"] == []
        for name in ("all", "mlp"):
            assert tokens_of(outputs[name]) == world.oracle().greedy(name, PROMPT, 6)

    def test_can_be_taken_back_before_it_has_got_its_slot(self, world):
        engine = world.engine(max_loras=1, max_cpu_loras=2)
        engine.add_lora(world.request("mlp"))
        engine.add_request("a", PROMPT, greedy(6), lora_request=world.request("qv"))
        engine.step()
        engine.pin_lora(3)

        assert engine.unpin_lora(3)

        output = run(engine)["a"]
        assert output.metrics.num_preemptions == 0
        assert not engine.unpin_lora(3)


class TestPinWhileAReloadWaits:
    """Requests that came before the reload have their weights, and what comes after it keeps the slot."""

    def test_reads_what_the_requests_before_it_were_promised(self, world):
        engine = world.engine()
        engine.add_request("old", PROMPT, greedy(6), lora_request=policy(world, 1, "qv"))
        new = policy(world, 2, "all", load_inplace=True)
        engine.add_request("new", PROMPT, greedy(6), lora_request=new)

        assert engine.pin_lora(9)

        assert engine.adapters.manager.pinned_adapters == {9}
        outputs = run(engine)
        assert tokens_of(outputs["old"]) == world.oracle().greedy("qv", PROMPT, 6)
        assert tokens_of(outputs["new"]) == world.oracle().greedy("all", PROMPT, 6)
        assert engine.debug_info()["pinned"] == [9]
        for name in ("mlp", "patterns", "all"):
            engine.add_lora(world.request(name))
        assert 9 in engine.adapters.manager.lora_index_to_id

    def test_does_not_change_the_weights_of_a_request_that_was_preempted(self, world):
        """Half of its answer is there. Its adapter has made way for another one, in slot and in memory."""
        engine = world.engine(max_loras=1, max_cpu_loras=1, max_lora_wait_steps=2)
        engine.add_request("old", PROMPT, greedy(6), lora_request=policy(world, 1, "qv"))
        engine.add_request("other", PROMPT, greedy(6), lora_request=world.request("mlp"))
        while 9 in engine.list_loras() or not engine.list_loras():
            assert engine.step() is not None
        assert engine.scheduler.requests["old"].num_output_tokens > 0
        new = policy(world, 2, "all", load_inplace=True)
        engine.add_request("new", PROMPT, greedy(6), lora_request=new)
        engine.abort_request("other")

        engine.pin_lora(9)

        outputs = run(engine)
        assert tokens_of(outputs["old"]) == world.oracle().greedy("qv", PROMPT, 6)
        assert tokens_of(outputs["new"]) == world.oracle().greedy("all", PROMPT, 6)
        assert engine.adapters.manager.pinned_adapters == {9}


class TestOverflow:
    """An adapter may be finite and still too much: then its own answers are lost, and no others."""

    @pytest.mark.parametrize("backend", ["loops", "grouped"])
    def test_harms_no_other_request_neither_beside_it_nor_after_it(self, world, folder, backend):
        rewrite(folder, lambda weight: weight * 1e160)
        # So few blocks that the next requests get those that the overflow was written to.
        engine = world.engine(punica_backend=backend, num_kv_blocks=12, enable_prefix_caching=False)
        engine.add_request(
            "inf", PROMPT, greedy(6, logprobs=1), lora_request=LoRARequest("mine", 9, str(folder))
        )
        engine.add_request("beside", PROMPT, greedy(6), lora_request=world.request("all"))
        outputs = run(engine)
        engine.add_request("after", PROMPT, greedy(6), lora_request=world.request("all"))
        engine.add_request("base", PROMPT[:3], greedy(6))
        engine.add_request("longer", PROMPT * 2, greedy(6))
        outputs |= run(engine)

        logprob = next(iter(outputs["inf"].outputs[0].logprobs[-1].values())).logprob
        assert logprob != logprob, "it did not overflow"
        assert outputs["inf"].outputs[0].finish_reason == "length"
        oracle = world.oracle()
        assert tokens_of(outputs["beside"]) == tokens_of(outputs["after"]) == oracle.greedy("all", PROMPT, 6)
        assert tokens_of(outputs["base"]) == oracle.greedy(None, PROMPT[:3], 6)
        assert tokens_of(outputs["longer"]) == oracle.greedy(None, PROMPT * 2, 6)


class TestOwnership:
    def test_an_aborted_request_whose_adapter_was_never_read_gives_back_name_and_id(self, world):
        engine = world.engine()
        engine.add_request("a", PROMPT, greedy(), lora_request=world.request("qv"))

        engine.abort_request("a")

        engine.add_request("b", PROMPT, greedy(4), lora_request=world.request("all", lora_int_id=1))
        assert tokens_of(run(engine)["b"]) == world.oracle().greedy("all", PROMPT, 4)


class TestAPathThatLeadsElsewhere:
    """An adapter is the folder that its path led to when it was registered, until somebody orders a reload."""

    @pytest.fixture
    def link(self, world, tmp_path):
        link = tmp_path / "current"
        link.symlink_to(world.path("all"))
        return link

    def turn(self, link, world):
        link.unlink()
        link.symlink_to(world.path("mlp"))

    def test_before_the_first_step_changes_no_weights(self, world, link):
        engine, current = world.engine(), LoRARequest("current", 7, str(link))
        engine.add_request("old", PROMPT, greedy(4), lora_request=current)

        self.turn(link, world)

        with pytest.raises(
            ValueError, match=r"adapter 'current' at '.*all'.*not to '.*current', which leads to"
        ):
            engine.add_request("new", PROMPT, greedy(4), lora_request=current)
        reload = replace(current, load_inplace=True)
        engine.add_request("reloaded", PROMPT, greedy(4), lora_request=reload)
        outputs = run(engine)
        assert tokens_of(outputs["old"]) == world.oracle().greedy("all", PROMPT, 4)
        assert tokens_of(outputs["reloaded"]) == world.oracle().greedy("mlp", PROMPT, 4)
        engine.add_request("after it", PROMPT, greedy(4), lora_request=current)
        assert tokens_of(run(engine)["after it"]) == world.oracle().greedy("mlp", PROMPT, 4)

    def test_in_the_middle_of_an_answer_changes_no_weights_when_they_are_read_again(self, world, link):
        engine = world.engine(max_loras=1, max_cpu_loras=1, max_lora_wait_steps=1)
        engine.add_request("a", PROMPT, greedy(9), lora_request=LoRARequest("current", 7, str(link)))
        engine.step()

        self.turn(link, world)

        engine.add_request("b", PROMPT, greedy(9), lora_request=world.request("qv"))
        outputs = run(engine)
        assert engine.get_metrics()["lora"]["loads"] > 2, "it was read once"
        assert tokens_of(outputs["a"]) == world.oracle().greedy("all", PROMPT, 9)

    def test_or_nowhere_is_the_adapters_by_its_text(self, world, link):
        engine, current = world.engine(), LoRARequest("current", 7, str(link))
        engine.add_lora(current)

        link.unlink()

        engine.add_request("a", PROMPT, greedy(4), lora_request=current)
        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("all", PROMPT, 4)
        with pytest.raises(ValueError, match="belongs to adapter 'current'"):
            engine.add_request("b", PROMPT, greedy(4), lora_request=replace(current, lora_path="elsewhere"))

    def test_since_the_process_works_in_another_folder_is_another_adapters(
        self, world, tmp_path, monkeypatch
    ):
        for here, name in (("one", "qv"), ("two", "all")):
            (tmp_path / here).mkdir()
            shutil.copytree(world.path(name), tmp_path / here / "mine")
        engine, mine = world.engine(), LoRARequest("mine", 7, "mine")
        monkeypatch.chdir(tmp_path / "one")
        engine.add_request("a", PROMPT, greedy(4), lora_request=mine)

        monkeypatch.chdir(tmp_path / "two")

        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("qv", PROMPT, 4)
        with pytest.raises(ValueError, match=r"one/mine'.*not to 'mine', which leads to '.*two/mine'"):
            engine.add_lora(mine)
