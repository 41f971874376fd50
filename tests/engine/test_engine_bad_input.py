"""What a user can get wrong through the engine: it is refused before anything changes, or fails alone."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from minivllm import LoRARequest, SamplingParams
from tests.worlds.engines import greedy, run, snapshot, tiny_world, tokens_of
from tests.worlds.spoiled_adapters import fill

PROMPT = [5, 6, 7, 8, 9]


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
    def test_that_failed_when_it_was_read_may_be_mended_and_come_again(self, world, engine, folder):
        good = (folder / "adapter_model.safetensors").read_bytes()
        fill(folder, float("nan"))
        engine.add_request("bad", PROMPT, greedy(), lora_request=LoRARequest("bad", 7, str(folder)))
        run(engine)

        (folder / "adapter_model.safetensors").write_bytes(good)

        engine.add_request("good", PROMPT, greedy(4), lora_request=LoRARequest("other name", 7, str(folder)))
        assert tokens_of(run(engine)["good"]) == world.oracle().greedy("qv", PROMPT, 4)


class TestNamesAndIds:
    @pytest.mark.parametrize("spelling", ["qv", "./qv/../qv"])
    def test_another_name_for_the_same_id_and_folder_is_an_alias(self, world, engine, spelling):
        alias = world.request("qv", lora_name="nickname", lora_path=f"{world.folder}/{spelling}")

        engine.add_request("a", PROMPT, greedy(6), lora_request=alias)

        assert tokens_of(run(engine)["a"]) == world.oracle().greedy("qv", PROMPT, 6)
        assert engine.get_metrics()["lora"]["by_adapter"][1]["loads"] == 1

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
    def test_an_id_or_a_name_that_is_taken_is_refused(self, world, engine, changes, message):
        taken = world.request("mlp", **changes)
        before = snapshot(engine)

        with pytest.raises(ValueError, match=message):
            engine.add_request("a", PROMPT, greedy(), lora_request=taken)

        assert snapshot(engine) == before


class TestSlots:
    def test_a_third_adapter_is_refused_while_all_slots_are_pinned(self, world, engine):
        engine.pin_lora(1)
        before = snapshot(engine)

        with pytest.raises(ValueError, match="'mlp' needs a slot but all 2 are pinned for others"):
            engine.add_request("a", PROMPT, greedy(), lora_request=world.request("mlp"))

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


class TestGenerate:
    @pytest.mark.parametrize("bad", ["", {"prompt": 5}, {"prompt_token_ids": [5, 999]}])
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


class TestGenerateBesideRequestsOfOthers:
    """Those that somebody has added to the same engine under ids of their own, which may be numbers."""

    def test_ends_none_of_them_when_a_prompt_is_refused(self, world):
        llm = world.llm()
        llm.llm_engine.add_request("0", PROMPT, greedy(3))

        with pytest.raises(ValueError, match="empty prompt"):
            llm.generate([{"prompt_token_ids": PROMPT}, {"prompt_token_ids": []}], greedy(3), use_tqdm=False)

        assert list(llm.llm_engine.scheduler.requests) == ["0"]
