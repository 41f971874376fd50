"""What a user can get wrong through the engine: it is refused before anything changes, or fails alone."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from minivllm import LoRARequest, SamplingParams
from tests.worlds.engines import greedy, run, snapshot, tiny_world, tokens_of
from tests.worlds.spoiled_adapters import fill

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.fixture
def engine(world):
    """An engine at work: one request runs, one waits, two adapters are in memory, one of them pinned."""
    engine = world.engine(max_model_len=64, max_num_seqs=2)
    engine.add_lora(world.request("all"))
    engine.pin_lora(2)
    engine.add_request("running", PROMPT, greedy(20), lora_request=world.request("qv"))
    engine.add_request("base", PROMPT, greedy(20))
    engine.add_request("waiting", PROMPT, greedy(4), lora_request=world.request("all"))
    engine.step()
    return engine


@pytest.fixture
def folder(world, tmp_path):
    """A copy of adapter 'qv' to spoil."""
    return shutil.copytree(world.path("qv"), tmp_path / "bad")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return tiny_world(tmp_path_factory).llm()


class TestBadAdapter:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_that_only_its_numbers_give_away_fails_alone_when_it_is_read(self, world, engine, folder, value):
        fill(folder, value)

        engine.add_request("bad", PROMPT, greedy(), lora_request=LoRARequest("bad", 7, str(folder)))

        outputs = run(engine)
        assert outputs["bad"].outputs[0].finish_reason == "error"
        assert "NaN or Inf" in outputs["bad"].error
        assert tokens_of(outputs["bad"]) == []
        assert tokens_of(outputs["running"]) == world.oracle().greedy("qv", PROMPT, 20)
        assert tokens_of(outputs["waiting"]) == world.oracle().greedy("all", PROMPT, 4)

    def test_that_failed_when_it_was_read_may_be_mended_and_come_again(self, world, engine, folder):
        good = (folder / "adapter_model.safetensors").read_bytes()
        fill(folder, float("nan"))
        engine.add_request("bad", PROMPT, greedy(), lora_request=LoRARequest("bad", 7, str(folder)))
        run(engine)

        (folder / "adapter_model.safetensors").write_bytes(good)

        engine.add_request("good", PROMPT, greedy(4), lora_request=LoRARequest("other name", 7, str(folder)))
        assert tokens_of(run(engine)["good"]) == world.oracle().greedy("qv", PROMPT, 4)


class TestNamesAndIds:
    def test_another_name_for_the_same_id_and_folder_is_an_alias(self, world, engine):
        alias = world.request("qv", lora_name="nickname")

        engine.add_request("a", PROMPT, greedy(6), lora_request=alias)

        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("qv", PROMPT, 6)
        assert engine.get_metrics()["lora"]["by_adapter"][1]["loads"] == 1

    def test_another_spelling_of_the_same_folder_is_the_same(self, world, engine):
        spelled = world.request("qv", lora_path=f"{world.folder}/./qv/../qv")

        engine.add_request("a", PROMPT, greedy(6), lora_request=spelled)

        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("qv", PROMPT, 6)

    @pytest.mark.parametrize("through", ["add_request", "add_lora"])
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"lora_name": "other", "lora_int_id": 1},
                r"lora_int_id 1 belongs to adapter 'qv' .*request 'running'",
            ),
            ({"lora_name": "qv", "lora_int_id": 9}, r"'qv' belongs to lora_int_id 1 .*request 'running'"),
            ({"lora_name": "all", "lora_int_id": 9}, r"'all' belongs to lora_int_id 2 \(add_lora\)"),
        ],
    )
    def test_an_id_or_a_name_that_is_taken_is_refused(self, world, engine, through, changes, message):
        taken = world.request("mlp", **changes)
        before = snapshot(engine)

        with pytest.raises(ValueError, match=message):
            if through == "add_lora":
                engine.add_lora(taken)
            else:
                engine.add_request("a", PROMPT, greedy(), lora_request=taken)

        assert snapshot(engine) == before

    def test_a_link_that_leads_elsewhere_by_now_names_neither_the_old_folder_nor_the_new_one(
        self, world, tmp_path
    ):
        """Else 'mlp' would be answered by 'all', which is what was read through the link."""
        engine = world.engine()
        link = tmp_path / "latest"
        link.symlink_to(world.path("all"))
        engine.add_lora(LoRARequest("latest", 7, str(link)))
        link.unlink()
        link.symlink_to(world.path("mlp"))

        for path, leads in [(world.path("mlp"), ""), (link, ", which leads to .*mlp' by now")]:
            owner = rf"lora_int_id 7 belongs to adapter 'latest' at '{world.path('all')}' \(add_lora\)"
            with pytest.raises(ValueError, match=f"{owner}, not to '{path}'{leads}.*load_inplace=True"):
                engine.add_request("a", PROMPT, greedy(), lora_request=LoRARequest("latest", 7, str(path)))

        engine.add_request("old", PROMPT, greedy(4), lora_request=LoRARequest("latest", 7, world.path("all")))
        new = LoRARequest("latest", 7, str(link), load_inplace=True)
        engine.add_request("new", PROMPT, greedy(4), lora_request=new)
        outputs = run(engine)
        assert tokens_of(outputs["old"]) == world.oracle().greedy("all", PROMPT, 4)
        assert tokens_of(outputs["new"]) == world.oracle().greedy("mlp", PROMPT, 4)


class TestSlots:
    def test_a_third_adapter_is_refused_while_all_slots_are_pinned(self, world, engine):
        engine.pin_lora(1)
        before = snapshot(engine)

        with pytest.raises(ValueError, match="'mlp' needs a slot but all 2 are pinned for others"):
            engine.add_request("a", PROMPT, greedy(), lora_request=world.request("mlp"))

        assert snapshot(engine) == before

    def test_a_waiting_request_is_refused_when_all_slots_come_to_be_pinned(self, world, engine):
        engine.add_request("third", PROMPT, greedy(), lora_request=world.request("mlp"))

        engine.pin_lora(1)

        outputs = run(engine)
        assert outputs["third"].outputs[0].finish_reason == "error"
        assert "all 2 are pinned" in outputs["third"].error
        assert tokens_of(outputs["running"]) == world.oracle().greedy("qv", PROMPT, 20)

    def test_an_adapter_is_not_loaded_when_memory_is_all_in_use(self, world):
        engine = world.engine(max_loras=1, max_cpu_loras=1)
        engine.add_request("a", PROMPT, greedy(8), lora_request=world.request("qv"))
        engine.step()
        before = snapshot(engine)

        with pytest.raises(RuntimeError, match="'all' cannot be loaded: the 1 adapters in memory"):
            engine.add_lora(world.request("all"))

        assert snapshot(engine) == before


BAD_REQUESTS = {
    "empty prompt": ({"prompt": []}, ValueError, "empty prompt"),
    "no prompt": ({"prompt": None}, ValueError, "NoneType for a prompt"),
    "prompt is a number": ({"prompt": 5}, ValueError, "int for a prompt"),
    "prompt is an array": ({"prompt": np.array([5, 6])}, ValueError, "ndarray for a prompt"),
    "empty dict": ({"prompt": {}}, ValueError, "NoneType for a prompt"),
    "text without tokenizer": ({"prompt": "hello"}, ValueError, "no tokenizer"),
    "text in a dict without tokenizer": ({"prompt": {"prompt": "hello"}}, ValueError, "no tokenizer"),
    "stop string without tokenizer": (
        {"params": SamplingParams(stop=["END"])},
        ValueError,
        r"stop strings \['END'\].*no tokenizer; leave them out",
    ),
    "ids are text": ({"prompt": {"prompt_token_ids": "567"}}, ValueError, "str for a prompt"),
    "id of another vocabulary": ({"prompt": [5, 97]}, ValueError, r"\[97\]; use ints from 0 to 96"),
    "negative id": ({"prompt": [5, -1]}, ValueError, r"\[-1\]"),
    "ids are floats": ({"prompt": [5.0]}, ValueError, r"\[5.0\]"),
    "ids are bools": ({"prompt": [True]}, ValueError, r"\[True\]"),
    "nested ids": ({"prompt": [[5, 6]]}, ValueError, r"\[\[5, 6\]\]"),
    "prompt as long as the context": ({"prompt": [5] * 64}, ValueError, "64 tokens.*max_model_len 64"),
    "request id in use": ({"request_id": "running"}, ValueError, "'running' is in use"),
    "request id of one that waits": ({"request_id": "waiting"}, ValueError, "'waiting' is in use"),
    "request id with a control character": ({"request_id": "a\x1b[2J"}, ValueError, "printable characters"),
    "request id with a lone surrogate": ({"request_id": "a\ud800"}, ValueError, "printable characters"),
    "request id of a megabyte": ({"request_id": "a" * 10**6}, ValueError, "at most 1024"),
    "arrival time is NaN": ({"arrival_time": float("nan")}, ValueError, "arrival_time of request 'bad'.*nan"),
    "arrival time is infinite": ({"arrival_time": float("inf")}, ValueError, "arrival_time.*inf"),
    "arrival time is text": ({"arrival_time": "now"}, ValueError, "arrival_time.*'now'"),
    "arrival time that no float holds": ({"arrival_time": 10**400}, ValueError, "arrival_time"),
    "arrival time is a bool": ({"arrival_time": True}, ValueError, "arrival_time"),
    "id that nobody can show": ({"prompt": [10**9000]}, ValueError, "use ints from 0 to 96"),
    "request id is a number": ({"request_id": 7}, TypeError, "request_id must be str, got 7"),
    "params are a dict": ({"params": {"max_tokens": 5}}, TypeError, "params must be SamplingParams"),
    "no params": ({"params": None}, TypeError, "params must be SamplingParams"),
    "adapter is a path": ({"lora_request": Path("qv")}, TypeError, "lora_request must be .*got .*Path"),
    "adapter of an unknown name": ({"lora_request": "vq"}, ValueError, "adapter 'vq' is unknown"),
    "unknown stop ids": ({"params": greedy(stop_token_ids=[5, 97])}, ValueError, r"stop_token_ids \[97\]"),
    "too many logprobs": ({"params": greedy(logprobs=98)}, ValueError, "logprobs is 98"),
}


class TestBadRequest:
    @pytest.mark.parametrize("what", BAD_REQUESTS)
    def test_is_refused_before_anything_changes(self, world, engine, what):
        changes, error, message = BAD_REQUESTS[what]
        arguments = {
            "request_id": "bad",
            "prompt": PROMPT,
            "params": greedy(),
            "lora_request": world.request("mlp"),
        }
        before = snapshot(engine)

        with pytest.raises(error, match=message):
            engine.add_request(**{**arguments, **changes})

        assert snapshot(engine) == before

    def test_that_the_kv_cache_could_never_hold_is_refused(self, world):
        engine = world.engine(num_kv_blocks=5, block_size=4)
        before = snapshot(engine)

        with pytest.raises(ValueError, match=r"may need 5 KV blocks .* but the cache has 4"):
            engine.add_request("a", PROMPT, greedy(13))

        assert snapshot(engine) == before
        engine.add_request("b", PROMPT, greedy(12))
        assert tokens_of(run(engine)["b"]) == world.oracle().greedy(None, PROMPT, 12)

    def test_with_an_adapter_is_refused_by_an_engine_without_lora(self, world):
        engine = world.engine(enable_lora=False)
        before = snapshot(engine)

        with pytest.raises(ValueError, match="LoRA is off"):
            engine.add_request("a", PROMPT, greedy(), lora_request=world.request("qv"))

        assert snapshot(engine) == before
        for call in (
            lambda: engine.add_lora(world.request("qv")),
            lambda: engine.pin_lora(1),
            lambda: engine.unpin_lora(1),
            lambda: engine.remove_lora(1),
            engine.list_loras,
        ):
            with pytest.raises(RuntimeError, match="LoRA is not enabled"):
                call()

    def test_takes_the_id_of_one_that_has_ended(self, world, engine):
        run(engine)

        engine.add_request("running", PROMPT, greedy(4))

        assert tokens_of(run(engine)["running"]) == world.oracle().greedy(None, PROMPT, 4)

    def test_aborting_what_is_not_there_changes_nothing(self, engine):
        before = snapshot(engine)

        engine.abort_request(["never", "was"])
        engine.abort_request("neither")
        engine.abort_request([])

        assert snapshot(engine) == before


class TestGenerate:
    @pytest.mark.parametrize(
        "bad", ["", [], 5, None, {"prompt": 5}, {"prompt_token_ids": [5, 999]}, {"prompt_token_ids": 5}]
    )
    def test_one_bad_prompt_and_none_is_run(self, world, llm, bad):
        before = snapshot(llm.llm_engine)
        before["metrics"].pop("finished")

        with pytest.raises(ValueError, match="request '"):
            llm.generate(["good", bad], greedy(), use_tqdm=False, lora_request=world.request("qv"))

        after = snapshot(llm.llm_engine)
        after["metrics"].pop("finished")
        assert after == before
        assert not llm.llm_engine.has_unfinished_requests()

    @pytest.mark.parametrize("bad", [{"sampling_params": [greedy(), None]}, {"lora_request": [None, 5]}])
    def test_one_argument_of_another_kind_and_none_is_run(self, llm, bad):
        with pytest.raises(TypeError):
            llm.generate(["good", "also good"], **{"sampling_params": greedy(), "use_tqdm": False, **bad})

        assert not llm.llm_engine.has_unfinished_requests()

    @pytest.mark.parametrize("name", ["sampling_params", "lora_request"])
    def test_a_list_of_another_length_is_refused(self, llm, name):
        for values in ([], [None] * 3):
            with pytest.raises(ValueError, match=f"{name} has {len(values)} entries for 2 prompts"):
                llm.generate(["a", "b"], use_tqdm=False, **{name: values})

    def test_no_prompts_give_no_answers(self, llm):
        assert llm.generate([], use_tqdm=False) == []

    def test_that_is_interrupted_leaves_no_request_behind(self, world, llm, monkeypatch):
        launch, interrupts = llm.llm_engine.runner.launch_model, []

        def interrupted(scheduled):
            if not interrupts:  # a second one would come while the caller's requests are ended
                interrupts.append(os.kill(os.getpid(), signal.SIGINT))
            return launch(scheduled)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.llm_engine.runner, "launch_model", interrupted)
            llm.generate(["a", "b"], greedy(30), use_tqdm=False)

        assert not llm.llm_engine.has_unfinished_requests()
        [answer] = llm.generate([PROMPT_DICT], greedy(4), use_tqdm=False)
        assert tokens_of(answer) == world.oracle().greedy(None, PROMPT, 4)


PROMPT_DICT = {"prompt_token_ids": PROMPT}


class TestGenerateBesideRequestsOfOthers:
    """Those that somebody has added to the same engine under ids of their own, which may be numbers."""

    def test_takes_ids_that_are_free(self, world):
        llm = world.llm()
        llm.llm_engine.add_request("1", PROMPT, greedy(30))
        others = llm.llm_engine.scheduler.requests["1"]

        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, greedy(3), use_tqdm=False)

        assert [tokens_of(output) for output in outputs] == [world.oracle().greedy(None, PROMPT, 3)] * 2
        assert llm.llm_engine.scheduler.requests == {"1": others}

    def test_ends_none_of_them_when_a_prompt_is_refused(self, world):
        llm = world.llm()
        llm.llm_engine.add_request("0", PROMPT, greedy(3))

        with pytest.raises(ValueError, match="empty prompt"):
            llm.generate([{"prompt_token_ids": PROMPT}, {"prompt_token_ids": []}], greedy(3), use_tqdm=False)

        assert list(llm.llm_engine.scheduler.requests) == ["0"]
