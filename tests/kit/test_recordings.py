"""What PEFT answered once: no check of an exercise imports it again, and what is recorded is what it answers today."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from labs.kit.forks import Job, run
from labs.kit.overlay import Source
from labs.kit.regions import read_engine
from tests.oracles.recorded import FOLDER, RecordedOracle
from tests.tools.nights import of_night
from tests.tools.recordings import differences, record

FORBIDDEN = {
    name: Source(f"{name}.py", "raise ImportError('a check waits for no oracle')")
    for name in ("peft", "transformers")
}
RECORDED = ("1.6", "7.3")  # of merged weights, and of answers


def assert_checked_without_oracles(numbers):
    jobs = [Job(number, number, FORBIDDEN, stop_at_first=True) for number in numbers]
    for job, outcome in run(jobs):
        assert outcome.passed, (job.key, outcome.trouble, outcome.of("failed", "todo"))


def test_exercises_whose_answers_are_recorded_import_no_oracle():
    assert_checked_without_oracles(RECORDED)


@pytest.mark.nightly
def test_no_exercise_imports_an_oracle():
    assert_checked_without_oracles(of_night(list(read_engine()), 3))


@pytest.mark.nightly
def test_peft_and_transformers_answer_what_is_recorded(tmp_path):
    record(tmp_path / "made")

    assert differences(FOLDER, tmp_path / "made") == []


def test_a_question_that_was_not_asked_names_the_way_to_ask_it():
    oracle = RecordedOracle(FOLDER / "world" / "answers.json")

    with pytest.raises(LookupError, match=r"4 tokens with adapter qv to \[96\].*recordings.py"):
        oracle.greedy("qv", [96], 4)


class TestDrift:
    """Each a change of what was recorded; nothing else may be told."""

    @pytest.fixture
    def made(self, tmp_path):
        return shutil.copytree(FOLDER, tmp_path / "made")

    def test_there_is_none_between_a_recording_and_its_copy(self, made):
        assert differences(FOLDER, made) == []

    @pytest.mark.parametrize("name", ["merged/rslora/merged.safetensors", "world/base/model.safetensors"])
    def test_of_one_number_is_told(self, name, made):
        tensors = load_file(made / name)
        key = sorted(tensors)[3]
        tensors[key].view(-1)[5] *= 1 + 1e-6
        save_file(tensors, made / name)

        assert differences(FOLDER, made) == [f"{name}: {key} is no longer what was recorded"]

    def test_of_last_bits_is_none(self, made):
        path = made / "merged/rslora/merged.safetensors"
        save_file({key: tensor * (1 + 1e-14) for key, tensor in load_file(path).items()}, path)

        assert differences(FOLDER, made) == []

    def test_of_an_answers_last_token_is_told(self, made):
        path = made / "world/answers.json"
        answers = json.loads(path.read_text())
        answers[30]["tokens"][-1] += 1
        path.write_text(json.dumps(answers))

        [said] = differences(FOLDER, made)
        assert said.startswith(f"world/answers.json: adapter {answers[30]['adapter']}, prompt [")

    def test_of_a_config_is_told_but_of_a_version(self, made):
        path = made / "world/qv/adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "lora_alpha": 9, "peft_version": "0"}))

        assert differences(FOLDER, made) == [
            "world/qv/adapter_config.json: lora_alpha is no longer what was recorded"
        ]

    def test_of_files_is_told(self, made):
        (made / "world/qv/adapter_model.safetensors").unlink()
        (made / "world/new.json").write_text("{}")

        assert differences(FOLDER, made) == [
            "world/new.json is only made anew",
            "world/qv/adapter_model.safetensors is only recorded",
        ]
