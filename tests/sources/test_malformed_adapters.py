"""60 malformed adapters against an engine with a running batch; `python tests/sources/malformed.py` sends 10,000.

In a process of its own: what it takes at most is the kernel's to say, and a bomb must not take the test run with it.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from malformed import attack
from safetensors.torch import load_file, save_file

from minivllm import LoRARequest
from minivllm.sources.resolver import FilesystemResolver
from tests.tools.limits import Peak, TimeLimit
from tests.worlds.adapter_folders import CONFIG, HANGS, MOST_MEMORY, WEIGHTS, set_size, write_safetensors
from tests.worlds.engines import greedy
from tests.worlds.models import character_tokenizer

Q0 = "model.layers.0.self_attn.q_proj"


def test_of_sixty_each_is_refused_in_a_sentence_and_changes_nothing():
    """Seconds are for the nightly run of the script: here other tests take theirs."""
    # A fork has transformers and PEFT already, whose import would take longer than the attack.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        report = pool.submit(attack, range(60), seed=1, limit=HANGS).result()

    assert [fault for fault in report.faults if " took " not in fault or " MB: " in fault] == []
    assert report.answers > 20, "whoever runs meanwhile gets the same tokens"
    outcomes = report.totals
    assert sum(outcomes.values()) == 60
    assert outcomes["ValueError"] > 20, "it was an attack"
    assert outcomes["FileNotFoundError"] > 1 and outcomes["failed alone"] > 2 and outcomes["served"] > 2


@pytest.fixture
def folder(world, tmp_path):
    return shutil.copytree(world.path("qv"), tmp_path / "adapter")


def assert_refused(load, *words):
    peak = Peak()
    with TimeLimit(HANGS), pytest.raises(ValueError) as raised:
        load()

    text = str(raised.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert len(text) <= 500 and text.isprintable()
    assert peak.growth() < MOST_MEMORY


@pytest.mark.parametrize("through", ["add_lora", "add_request", "a load whose check was another file's"])
def test_a_terabyte_of_a_known_module_is_refused_by_its_shape_and_not_read(world, folder, through):
    """The file is that long, and takes no place on the disk."""
    engine, name, rows = world.engine(), f"base_model.model.{Q0}.lora_A.weight", 2**36
    entries = {
        name.replace("_A", "_B"): {"dtype": "F32", "shape": [48, 4], "data_offsets": [0, 768]},
        name: {"dtype": "F32", "shape": [4, rows], "data_offsets": [768, 768 + 16 * rows]},
    }
    write_safetensors(folder / WEIGHTS, entries, more=768 + 16 * rows)
    bad = LoRARequest("bad", 7, str(folder))

    load = {
        "add_lora": lambda: engine.add_lora(bad),
        "add_request": lambda: engine.add_request("r", [3, 4], greedy(), lora_request=bad),
        "a load whose check was another file's": lambda: engine.adapters.worker.add_adapter(bad),
    }[through]

    assert_refused(load, Q0, f"(4, {rows})", "expected (4, 48)")


def test_more_tensors_than_the_model_has_use_for_are_refused_by_their_number(world, folder):
    entry = {"dtype": "F32", "shape": [4, 48], "data_offsets": [0, 0]}
    names = [f"model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in range(1000)]
    write_safetensors(folder / WEIGHTS, dict.fromkeys(names, entry))

    assert_refused(
        lambda: world.engine().add_lora(LoRARequest("bad", 7, str(folder))),
        "1001 tensors, at most",
        "are read",
    )


def test_pickles_are_served_unless_an_option_refuses_them(world, folder):
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    request = LoRARequest("pickled", 7, str(folder))

    assert world.engine().add_lora(request)
    assert_refused(
        lambda: world.engine(refuse_pickles=True).add_lora(request),
        "adapter_model.bin",
        "save it as safetensors",
    )


class TestTokenizers:
    """Of adapters that add tokens: those are read."""

    @pytest.fixture
    def folder(self, folder):
        save_file({"input_embeddings": torch.ones(3, 48)}, folder / "new_embeddings.safetensors")
        character_tokenizer().save_pretrained(folder)
        return folder

    @pytest.fixture
    def add(self, world, folder):
        engine = world.engine(character_tokenizer(), lora_extra_vocab_size=4)
        bad = LoRARequest("bad", 7, str(folder))
        return lambda: engine.add_request("r", "text", greedy(2), lora_request=bad)

    def test_that_are_good_are_served(self, add):
        assert add() == "r"

    @pytest.mark.parametrize("value", ["12", "abc", [], {}, True])
    def test_with_a_longest_text_that_is_no_number_are_refused(self, folder, add, value):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": value}))

        assert_refused(add, "adapter 'bad'", "model_max_length must be a number", repr(value))

    @pytest.mark.parametrize(
        ("name", "size"), [("tokenizer.json", 2**40), ("added_tokens.json", 2**40), ("config.json", 2**23)]
    )
    def test_of_files_that_are_too_large_are_refused(self, folder, add, name, size):
        set_size(folder / name, size)

        assert_refused(add, "adapter 'bad'", f"{name} has {size} bytes")

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
    def test_with_a_pipe_for_a_file_are_refused(self, folder, add, name):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

        assert_refused(add, "adapter 'bad'", f"{name} is no plain file")


class TestResolvers:
    @pytest.mark.parametrize("trained_on", ["a/" * 400_000, "x" * 500_000, "\x1b[2J\n"])
    def test_are_not_kept_busy_by_what_an_adapter_was_trained_on(self, folder, trained_on, caplog):
        path = folder / CONFIG
        config = {**json.loads(path.read_text()), "base_model_name_or_path": trained_on}
        path.write_text(json.dumps(config))

        with TimeLimit(HANGS):
            found = asyncio.run(FilesystemResolver(folder.parent).resolve_lora("/models/base", folder.name))

        assert found is None
        [message] = [record.getMessage() for record in caplog.records]
        assert len(message) <= 500 and message.isprintable() and "was trained on" in message

    def test_leave_a_config_that_is_too_large_to_the_loader(self, folder):
        set_size(folder / CONFIG, 2**40)

        with TimeLimit(HANGS):
            found = asyncio.run(FilesystemResolver(folder.parent).resolve_lora("/models/base", folder.name))

        assert found.lora_path == str(folder)
