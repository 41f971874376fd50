"""Adapter folders that are not what they should be, and come from anybody.

Each is refused in one sentence, within a second and in little memory, both when its shapes are looked at and when it is
read as a whole. Whatever is in a folder, only ValueError and FileNotFoundError come out of reading it.
"""

import json
import os
import random
import struct
import threading

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.lora import limits, weights_files
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.weights_files import read_weights, reading
from tests.tools.limits import Peak, TimeLimit
from tests.worlds.adapter_folders import (
    CONFIG,
    DOWN,
    HANGS,
    MODEL_MODULES,
    MOST_MEMORY,
    PREFIX,
    RANK,
    WEIGHTS,
    A,
    B,
    Q,
    assert_refused,
    good_config,
    good_tensors,
    load,
    read_safetensors,
    set_size,
    write,
    write_safetensors,
)


@pytest.fixture
def folder(tmp_path):
    """A good adapter; tests spoil it."""
    return write(tmp_path / "adapter")


def test_the_folder_that_the_tests_spoil_is_good(folder):
    assert len(load(folder).loras) == 3
    assert len(load(folder, shapes_only=True).loras) == 3


class TestFilesThatAreNotThere:
    @pytest.mark.parametrize("name", ["nowhere", "a\0b", "x" * 5000, "\ud800"], ids=ascii)
    def test_no_folder(self, tmp_path, name):
        assert_refused(f"{tmp_path}/{name}", "does not exist", error=FileNotFoundError)

    def test_a_folder_that_is_a_loop_of_links(self, tmp_path):
        (tmp_path / "loop").symlink_to("loop")

        assert_refused(tmp_path / "loop", "loop' does not exist", error=FileNotFoundError)

    def test_a_file_instead_of_a_folder(self, folder):
        words = f"{WEIGHTS}' is a file", "give the folder that has its adapter_config.json"

        assert_refused(folder / WEIGHTS, *words, error=FileNotFoundError)

    @pytest.mark.parametrize(
        ("name", "words"),
        [(CONFIG, [f"no {CONFIG}"]), (WEIGHTS, ["has no weights file", WEIGHTS, "adapter_model.bin"])],
    )
    @pytest.mark.parametrize("kind", ["nothing", "folder", "loop", "dangling", "pipe"])
    def test_nothing_or_something_else_under_the_name_of_a_file(self, name, words, kind, folder):
        """A pipe above all: opened, it would wait for ever."""
        path = folder / name
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind != "nothing":
            path.symlink_to(name if kind == "loop" else "nowhere")

        assert_refused(folder, folder, *words, error=FileNotFoundError)

    def test_a_pipe_that_comes_between_the_look_and_the_reading_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / WEIGHTS)
        raised = []

        def read():
            with pytest.raises(ValueError, match="no plain file") as error, reading(tmp_path / WEIGHTS):
                pass
            raised.append(error)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(10)

        assert raised

    @pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
    def test_a_file_that_may_not_be_read(self, name, folder, monkeypatch):
        """A stand-in for permissions, which do not bind root."""
        real = os.open

        def refuse(file, *args, **kwargs):
            if str(file).endswith(name):
                raise PermissionError(13, "Permission denied", str(file))
            return real(file, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)

        assert_refused(folder, folder / name, "cannot be read", "Permission denied")


def nested(depth):
    return json.dumps(good_config()).replace('"none"', "[" * depth + "]" * depth).encode()


# What is in adapter_config.json, as bytes or as changes of a good one -> what is said of it beside its name. Of all
# fields: phase 01's test_peft_helper.
CONFIGS = {
    "empty": (b"", "is not valid JSON"),
    "cut": (b"{", "is not valid JSON"),
    "prose": (b"not json", "is not valid JSON"),
    "comma": (b'{"r": 4,}', "is not valid JSON"),
    "not utf-8": (b"\xff\xfe\x00\x01", "is not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "is not valid JSON"),
    "huge int": (b'{"r": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    "brackets": (b"[" * 100_000, "is not valid JSON"),
    "lists in lists": (nested(17), "nested"),
    "deeper than the parser goes": (nested(900), "nested"),
    "a field twice": (b'{"r": 8, "r": 3}', "'r' is there twice"),
    "a list": (b"[]", "holds a list, expected a JSON object"),
    "null": (b"null", "holds a NoneType, expected a JSON object"),
    "a field missing": ({"target_modules": ...}, "target_modules"),
    "beyond floats": ({"lora_alpha": 10**400}, "lora_alpha must be"),
    "a kind in a list": ({"peft_type": ["LORA"]}, "peft_type ['LORA']"),
}


class TestConfigs:
    @pytest.mark.parametrize(("content", "words"), CONFIGS.values(), ids=CONFIGS)
    def test_that_are_not_what_they_should_be_name_the_file_and_what_is_wrong(self, content, words, folder):
        text = content if isinstance(content, bytes) else json.dumps(good_config(**content)).encode()
        (folder / CONFIG).write_bytes(text)

        assert_refused(folder, folder / CONFIG, words)

    @pytest.mark.parametrize("size", [limits.CONFIG_BYTES + 1, 2**40])
    def test_that_are_too_large_are_not_read(self, size, folder):
        set_size(folder / CONFIG, size)

        assert_refused(folder, CONFIG, f"has {size} bytes, more than the 1048576")

    def test_of_exactly_the_limit_are_read(self, folder):
        text = (folder / CONFIG).read_text()
        (folder / CONFIG).write_text(text + " " * (limits.CONFIG_BYTES - len(text)))

        assert len(load(folder).loras) == 3

    @pytest.mark.parametrize("init", ["something new", "loftq ", 1, 0, [], ["gaussian"]])
    def test_with_an_unknown_initialisation_are_refused(self, init):
        helper = PEFTHelper.from_dict(good_config(init_lora_weights=init), LORA_EXTENSIONS)

        with pytest.raises(ValueError, match=r"init_lora_weights .*; train with"):
            helper.validate_legal(LoRAConfig())

    def test_with_too_many_target_parameters_are_refused(self):
        with pytest.raises(ValueError, match="target_parameters has 2049 entries, at most 2048"):
            PEFTHelper.from_dict(good_config(target_parameters=["experts.down_proj"] * 2049), LORA_EXTENSIONS)

    def test_of_what_is_not_served_are_refused_by_name(self, folder):
        (folder / CONFIG).write_text(json.dumps(good_config(layer_replication=[[0, 2], [1, 3]], r=32)))

        assert_refused(folder, "layer_replication", "rank 32 is greater than max_lora_rank 16")

    def test_that_do_not_say_their_targets_are_read_by_the_tensors(self, folder):
        (folder / CONFIG).write_text(json.dumps(good_config(target_modules=None)))

        assert len(load(folder).loras) == 3

    def test_of_another_rank_than_the_tensors_are_refused(self, folder):
        """PEFT cannot read it either; with scaling by one or the other rank, it might be served wrongly."""
        (folder / CONFIG).write_text(json.dumps(good_config(r=RANK + 1, rank_pattern={"up_proj": 7})))

        assert_refused(folder, folder / WEIGHTS, DOWN, f"has rank {RANK}", "[4, 7]")

    def test_with_patterns_are_honoured(self, folder):
        """Incident 9: ignored, q_proj would be scaled by 6 / 3."""
        (folder / CONFIG).write_text(json.dumps(good_config(alpha_pattern={"q_proj": 15})))

        lora = load(folder)

        assert lora.loras[Q].scaling == 5
        assert lora.loras[DOWN].scaling == 2


def entry(dtype="F32", shape=(3, 6), data_offsets=(0, 72)):
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def follow(*offsets):
    """Tensors of one number each that lie at these places."""
    return {name: entry(shape=[1], data_offsets=place) for name, place in zip(("first", "second"), offsets)}


MANY = {
    f"model.layers.{i}.q_proj.lora_A.weight": entry(shape=[0, 4], data_offsets=(0, 0)) for i in range(100_002)
}
# The header of a safetensors file of 72 bytes, true or not -> what is said of it.
HEADERS = {
    "offsets": ({A: entry(data_offsets=(0, 9))}, "needs 72 bytes and has 9"),
    "huge": ({A: entry(shape=(3, 2**62))}, "needs"),
    "negative": ({A: entry(shape=(-3, 6))}, "that no tensor has"),
    "backwards": ({A: entry(data_offsets=(72, 0))}, "needs 72 bytes and has -72"),
    "text": ({A: entry(shape="3x6")}, "that no tensor has"),
    "unknown dtype": ({A: entry(dtype="F33")}, "lacks a dtype that torch has"),
    "no torch dtype": ({A: entry(dtype="F6_E2M3", shape=(3, 32))}, "lacks a dtype that torch has"),
    "lacking": ({A: {"shape": [3, 6]}}, "lacks a dtype"),
    "list": ({A: []}, "lacks a dtype"),
    "overlap": (follow((0, 4), (2, 6)), "second does not begin where the tensor before it ends"),
    "hole": (follow((0, 4), (6, 10)), "second does not begin where the tensor before it ends"),
    "more data": (follow((0, 4), (4, 8)), "its header tells of"),
    "no object": (b"null", "its header is a NoneType, not an object"),
    "deep": (b'{"a":' * 50_000, "nested too deep"),
    "bomb of brackets": (b"[" * 15_000_000, "'[' in its header"),
    "bomb of commas": (b'{"a":{"shape":[' + b"1," * 5_000_000 + b"1]}}", "',' in its header"),
    "long": (b" " * (limits.HEADER_BYTES + 1), "its header has"),
    "too many tensors": (MANY, "tensors, at most 100002 are read"),
    "a name of megabytes": (
        {"x" * 10_000_000: entry()},
        "a tensor's name has 10000000 characters, at most 512",
    ),
}


class TestSafetensors:
    @pytest.mark.parametrize(("header", "words"), HEADERS.values(), ids=HEADERS)
    def test_whose_header_lies_or_is_a_bomb(self, header, words, folder):
        write_safetensors(folder / WEIGHTS, header, b"\x01" * 72)

        assert_refused(folder, folder / WEIGHTS, "not a readable safetensors file", words)

    @pytest.mark.parametrize("cut", [0, 7, 8, "mid header", "header", "header + 1", -1])
    def test_cut_short(self, cut, folder):
        data = (folder / WEIGHTS).read_bytes()
        header = 8 + struct.unpack("<Q", data[:8])[0]
        places = {"mid header": header // 2, "header": header, "header + 1": header + 1}
        (folder / WEIGHTS).write_bytes(data[: places.get(cut, cut)])

        assert_refused(folder, folder / WEIGHTS, "not a readable safetensors file")

    @pytest.mark.parametrize(
        "data",
        [b"not safetensors at all", struct.pack("<Q", 2**63) + b"{}", b"\x80\x02."],
        ids=["prose", "endless header", "a pickle"],
    )
    def test_of_other_bytes(self, data, folder):
        (folder / WEIGHTS).write_bytes(data)

        assert_refused(folder, folder / WEIGHTS, "not a readable safetensors file")

    def test_without_tensors(self, folder):
        write_safetensors(folder / WEIGHTS, {})

        assert_refused(folder, folder / WEIGHTS, "holds no LoRA weights")

    def test_of_a_terabyte_are_refused_by_their_names(self, folder):
        """Without an engine nobody knows what shapes it needs. With one: sources/test_malformed_adapters."""
        large = entry(shape=[4, 2**36], data_offsets=(0, 2**40))
        write_safetensors(folder / WEIGHTS, {"base_model.model.other.lora_A.weight": large}, more=2**40)

        assert_refused(folder, "other has lora_A but not lora_B", ways=["shapes only"])

    def test_the_copy_of_the_base_embedding_is_not_read(self, folder):
        header, data = read_safetensors(folder / WEIGHTS)
        name, size = f"{PREFIX}model.embed_tokens.base_layer.weight", 2**34
        header[name] = entry(shape=[2**20, 2**12], data_offsets=[len(data), len(data) + size])
        write_safetensors(folder / WEIGHTS, header, data, more=size)
        peak = Peak()

        with TimeLimit(HANGS):
            lora = load(folder)

        assert len(lora.loras) == 3
        assert peak.growth() < MOST_MEMORY

    def test_that_shrink_between_check_and_load_are_refused(self, folder, monkeypatch):
        judged = weights_files.find_safetensors

        def shrink(*args):
            stored = judged(*args)
            set_size(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)
            return stored

        monkeypatch.setattr(weights_files, "find_safetensors", shrink)

        assert_refused(folder, WEIGHTS, "was cut short while it was read", ways=["whole"])

    def test_are_read_as_the_library_reads_them(self, folder):
        from safetensors.torch import load_file, save_file

        dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
        generator = torch.Generator().manual_seed(3)
        tensors = {
            f"t{i}": (torch.randn(i + 1, 3 + i, generator=generator) * 9).to(dtype)
            for i, dtype in enumerate(dtypes)
        }
        save_file({**tensors, "scalar": torch.tensor(2.5), "nothing": torch.ones(0, 4)}, folder / WEIGHTS)

        read = read_weights(folder / WEIGHTS)

        expected = load_file(folder / WEIGHTS)
        assert list(read) == sorted(expected)
        assert all(torch.equal(read[name], expected[name]) for name in expected)
        assert all(read[name].dtype == expected[name].dtype for name in expected)


ONLY = "only lora_A, lora_B"
# Tensors that are added to good ones, or take their place; `None` is one less -> what is said of them.
TENSORS = [
    ({A: torch.ones(RANK)}, [A, "must be a matrix", "(3,)"]),
    ({A: torch.ones(())}, [A, "must be a matrix", "()"]),
    ({A: torch.ones(1, RANK, 6)}, [A, "must be a matrix", "(1, 3, 6)"]),
    ({A: torch.ones(0, 6)}, [A, "at least rank 1", "(0, 6)"]),
    ({B: torch.ones(10, 0)}, [B, "at least rank 1", "(10, 0)"]),
    ({A: torch.ones(0, 6), B: torch.ones(10, 0)}, [Q, "at least rank 1"]),
    ({A: torch.ones(RANK, 0)}, [A, "(3, 0)"]),
    ({A: torch.ones(6, RANK)}, [Q, "(6, 3)", "(10, 3)", "differ in rank"]),
    ({A: torch.ones(2, 6), B: torch.ones(10, 2)}, [Q, "has rank 2", "gives only [3]"]),
    ({A: None}, [Q, "has lora_B but not lora_A"]),
    ({B: None}, [Q, "has lora_A but not lora_B"]),
    *[
        ({A: torch.ones(RANK, 6).to(dtype)}, [A, str(dtype), "float32"])
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ],
    *[
        ({name: torch.ones(3)}, [f"{name} is unsupported LoRA weight", why])
        for name, why in (
            (f"{PREFIX}{Q}.lora_magnitude_vector", "DoRA"),
            (f"{PREFIX}model.embed_tokens.trainable_tokens_delta", "trainable_token_indices"),
            (f"{PREFIX}{Q}.lora_B.bias", "lora_bias"),
            (f"{PREFIX}{Q}.base_layer.bias", "bias='none'"),
            (f"{PREFIX}{Q}.base_layer.weight", ONLY),
            (f"{PREFIX}model.embed_tokens.weight", "save_embedding_layers=False"),
            (f"{PREFIX}model.norm.weight", ONLY),
            ("", ONLY),
        )
    ],
]


class TestTensors:
    @pytest.mark.parametrize(("changes", "words"), TENSORS)
    def test_of_wrong_names_shapes_and_dtypes_are_named_with_what_was_expected(self, changes, words, folder):
        tensors = {**good_tensors(), **changes}
        write(folder, tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})

        assert_refused(folder, folder / WEIGHTS, *words)

    @pytest.mark.parametrize(
        ("name", "value", "dtype"),
        [
            (A, float("nan"), torch.float32),
            (A, float("-inf"), torch.bfloat16),
            (B, float("inf"), torch.float16),
            (B, float("nan"), torch.bfloat16),
        ],
    )
    def test_with_nan_or_inf_anywhere_are_refused(self, name, value, dtype, folder):
        tensors = good_tensors(dtype)
        tensors[name][-1, -1] = value
        write(folder, tensors=tensors)

        assert_refused(folder, f"{name.removeprefix(PREFIX)[:-7]} holds NaN or Inf", ways=["whole"])

    @pytest.mark.parametrize("alpha", [1e38, -1e38, 1e300])
    def test_that_become_inf_once_scaled_are_refused(self, alpha, folder):
        tensors = {name: tensor * 100 for name, tensor in good_tensors().items()}
        write(folder, good_config(lora_alpha=alpha), tensors)

        assert_refused(folder, "lora_B holds NaN or Inf as torch.float32", ways=["whole"])

    def test_that_are_refused_are_not_converted_first(self):
        """Half as wide in the file as in the engine: a copy of all of them would be thrice the file."""
        size, ones = 48 * 2**20, torch.ones(1, dtype=torch.bfloat16)
        tensors = {
            f"{PREFIX}layers.{i}.q_proj.lora_{side}.weight": ones.expand(shape).contiguous()
            for i in range(2)
            for side, shape in (("A", (3, size // 6)), ("B", (4, 3)))
        }
        tensors[f"{PREFIX}layers.1.q_proj.lora_B.weight"][-1, -1] = float("nan")
        helper = PEFTHelper.from_dict(good_config(), LORA_EXTENSIONS)
        peak = Peak()

        with pytest.raises(ValueError, match=r"layers.1.q_proj.lora_B holds NaN or Inf as torch.float32"):
            LoRAModel.from_lora_tensors(1, tensors, helper, dtype=torch.float32)

        assert peak.growth() < size


class TestTargets:
    def test_that_the_model_does_not_have_are_listed_beside_those_it_has(self, folder):
        """Incident 8: it loaded, and served the base model."""
        others = {
            f"{PREFIX}transformer.h.{layer}.attn.c_attn.lora_{side}.weight": torch.ones(shape)
            for layer in range(10)
            for side, shape in (("A", (RANK, 6)), ("B", (8, RANK)))
        }
        write(folder, tensors={**good_tensors(), **others})

        words = "transformer.h.0.attn.c_attn", "and 2 more", *MODEL_MODULES
        assert_refused(folder, folder / WEIGHTS, *words)

    def test_that_share_nothing_with_what_the_server_wraps_are_refused(self, folder):
        """Incident 22: the base model was served in the adapter's name."""
        assert_refused(folder, Q, DOWN, "['gate_proj', 'k_proj']", expected=["k_proj", "gate_proj"])

    @pytest.mark.parametrize("expected", [["q_proj", "v_proj"], ["q_proj", "v_proj", "my_down_proj"], []])
    def test_that_are_only_partly_there_are_refused(self, expected, folder):
        assert_refused(folder, DOWN, expected=expected)


def is_refused(folder, shapes_only):
    """Whether reading raises what it may raise; anything else passes through and fails the test."""
    try:
        lora = load(folder, shapes_only=shapes_only)
    except (ValueError, FileNotFoundError) as error:
        assert str(error).strip()
        return True
    assert lora.loras
    return False


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "adapter_model.bin"])
def test_damaged_bytes_never_come_out_as_anything_but_a_refusal(name, folder):
    """Seeded fuzzing of the config, the header of the weights, and a pickle: refused, or still sound."""
    if name == "adapter_model.bin":
        (folder / WEIGHTS).unlink()
        torch.save(good_tensors(), folder / name)
    data = (folder / name).read_bytes()
    until = 8 + struct.unpack("<Q", data[:8])[0] if name == WEIGHTS else len(data)
    rng = random.Random(name)
    refusals = 0

    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(until)] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(damaged)
        whole, shapes = (is_refused(folder, shapes_only) for shapes_only in (False, True))

        assert whole or not shapes, "what is refused by its shapes must not be served"
        refusals += whole

    assert refusals > 20
