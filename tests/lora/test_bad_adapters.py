"""Adapter folders that are not what they should be: each is refused in one sentence, and runs nothing.

Whatever is in a folder, only ValueError and FileNotFoundError come out of reading it.
"""

import json
import os
import pickle
import random
import struct
import threading

import pytest
import torch

from minivllm.lora.weights_files import reading
from tests.worlds.adapter_folders import (
    DOWN,
    MODEL_MODULES,
    PREFIX,
    RANK,
    Q,
    good_config,
    good_tensors,
    load,
    write,
    write_safetensors,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"

QUANTIZED = torch.quantize_per_tensor(torch.ones(3, 6), 0.1, 0, torch.qint8)

both_ways = pytest.mark.parametrize("shapes_only", [False, True], ids=["whole", "shapes only"])


@pytest.fixture
def folder(tmp_path):
    """A good adapter; tests spoil it."""
    return write(tmp_path / "adapter")


def assert_refused(folder, *words, error=ValueError, **options):
    """Reading it raises `error`, with all the words in the message."""
    with pytest.raises(error) as raised:
        load(folder, **options)

    missing = [word for word in words if str(word) not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


def test_the_folder_that_the_tests_spoil_is_good(folder):
    assert len(load(folder).loras) == 3
    assert len(load(folder, shapes_only=True).loras) == 3


class TestFilesThatAreNotThere:
    def test_no_folder(self, tmp_path):
        assert_refused(tmp_path / "nowhere", "nowhere' does not exist", error=FileNotFoundError)

    def test_a_file_instead_of_a_folder(self, folder):
        words = f"{WEIGHTS}' is a file", "give the folder that has its adapter_config.json"

        assert_refused(folder / WEIGHTS, *words, error=FileNotFoundError)

    @pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\ud800"], ids=["null", "too long", "surrogate"])
    def test_a_name_that_no_folder_can_have(self, name):
        assert_refused(name, "does not exist", error=FileNotFoundError)

    def test_no_config(self, folder):
        (folder / CONFIG).unlink()

        assert_refused(folder, folder, "no adapter_config.json", error=FileNotFoundError)

    @both_ways
    def test_no_weights(self, folder, shapes_only):
        (folder / WEIGHTS).unlink()

        assert_refused(
            folder, folder, WEIGHTS, "adapter_model.bin", error=FileNotFoundError, shapes_only=shapes_only
        )

    @pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
    @pytest.mark.parametrize("kind", ["folder", "loop", "dangling", "pipe"])
    def test_something_else_under_the_name_of_a_file(self, name, kind, folder):
        """A pipe above all: opened, it would wait for ever."""
        path = folder / name
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(name if kind == "loop" else "nowhere")

        assert_refused(folder, folder, name, error=FileNotFoundError)

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

    def test_a_folder_that_is_a_loop_of_links(self, tmp_path):
        (tmp_path / "loop").symlink_to("loop")

        assert_refused(tmp_path / "loop", "loop' does not exist", error=FileNotFoundError)

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


class TestConfigs:
    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"{",
            b"not json",
            b'{"r": 4,}',
            b"\xff\xfe\x00\x01",
            b"\xef\xbb\xbf{}",
            b'{"r": ' + b"9" * 5000 + b"}",
            b"[" * 100_000,
        ],
        ids=["empty", "cut", "prose", "comma", "not utf-8", "byte order mark", "huge int", "deep"],
    )
    def test_that_are_not_json(self, text, folder):
        (folder / CONFIG).write_bytes(text)

        assert_refused(folder, folder / CONFIG, "is not valid JSON")

    @pytest.mark.parametrize(("value", "kind"), [([], "list"), ("r", "str"), (4, "int"), (None, "NoneType")])
    def test_that_are_not_an_object(self, value, kind, folder):
        (folder / CONFIG).write_text(json.dumps(value))

        assert_refused(folder, folder / CONFIG, f"holds a {kind}", "expected a JSON object")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"target_modules": ...}, ["Missing required", "target_modules"]),
            ({"lora_alpha": 10**400}, ["lora_alpha must be"]),
            ({"peft_type": ["LORA"]}, ["peft_type ['LORA']", "only LORA"]),
        ],
    )
    def test_whose_fields_are_not_what_they_should_be_name_the_file_and_the_field(
        self, changes, words, folder
    ):
        """Of all fields: phase 01's test_peft_helper."""
        (folder / CONFIG).write_text(json.dumps(good_config(**changes)))

        assert_refused(folder, folder / CONFIG, *words)

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


class TestSafetensors:
    @both_ways
    @pytest.mark.parametrize(
        "cut",
        [0, 1, 7, 8, 9, "mid header", "header", "header + 1", "half", -1],
    )
    def test_cut_short(self, cut, shapes_only, folder):
        data = (folder / WEIGHTS).read_bytes()
        header = 8 + struct.unpack("<Q", data[:8])[0]
        places = {
            "mid header": header // 2,
            "header": header,
            "header + 1": header + 1,
            "half": len(data) // 2,
        }
        (folder / WEIGHTS).write_bytes(data[: places.get(cut, cut)])

        assert_refused(folder, folder / WEIGHTS, "not a readable safetensors file", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize(
        "data",
        [
            b"not safetensors at all",
            struct.pack("<Q", 2**63) + b"{}",
            struct.pack("<Q", 4) + b"null",
            b"\x80\x02.",
        ],
        ids=["prose", "endless header", "no object", "a pickle"],
    )
    def test_of_other_bytes(self, data, shapes_only, folder):
        (folder / WEIGHTS).write_bytes(data)

        assert_refused(folder, folder / WEIGHTS, "not a readable safetensors file", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": "F32", "shape": [3, 6], "data_offsets": [0, 9]},
            {"dtype": "F32", "shape": [3, 2**62], "data_offsets": [0, 72]},
            {"dtype": "F32", "shape": [-3, 6], "data_offsets": [0, 72]},
            {"dtype": "F32", "shape": [3, 6], "data_offsets": [72, 0]},
            {"dtype": "F32", "shape": "3x6", "data_offsets": [0, 72]},
            {"dtype": "F33", "shape": [3, 6], "data_offsets": [0, 72]},
            {"dtype": "F6_E2M3", "shape": [3, 32], "data_offsets": [0, 72]},
            {"shape": [3, 6]},
            [],
        ],
        ids=[
            "offsets",
            "huge",
            "negative",
            "backwards",
            "text",
            "unknown dtype",
            "no torch dtype",
            "lacking",
            "list",
        ],
    )
    def test_whose_header_lies(self, entry, shapes_only, folder):
        write_safetensors(folder / WEIGHTS, {A: entry}, b"\x01" * 72)

        assert_refused(folder, folder / WEIGHTS, "not a readable safetensors file", shapes_only=shapes_only)

    @both_ways
    def test_without_tensors(self, shapes_only, folder):
        write_safetensors(folder / WEIGHTS, {}, b"")

        assert_refused(folder, folder / WEIGHTS, "holds no LoRA weights", shapes_only=shapes_only)


class TestTensors:
    @both_ways
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({A: torch.ones(RANK)}, [A, "must be a matrix", "(3,)"]),
            ({A: torch.ones(())}, [A, "must be a matrix", "()"]),
            ({A: torch.ones(1, RANK, 6)}, [A, "must be a matrix", "(1, 3, 6)"]),
            ({A: torch.ones(0, 6)}, [A, "at least rank 1", "(0, 6)"]),
            ({B: torch.ones(10, 0)}, [B, "at least rank 1", "(10, 0)"]),
            ({A: torch.ones(0, 6), B: torch.ones(10, 0)}, [Q, "at least rank 1"]),
            ({A: torch.ones(RANK, 0)}, [A, "(3, 0)"]),
            ({A: torch.ones(6, RANK)}, [Q, "(6, 3)", "(10, 3)", "differ in rank"]),
            ({A: torch.ones(2, 6)}, [Q, "(2, 6)", "(10, 3)", "differ in rank"]),
            ({A: torch.ones(2, 6), B: torch.ones(10, 2)}, [Q, "has rank 2", "gives only [3]"]),
            ({A: None}, [Q, "has lora_B but not lora_A"]),
            ({B: None}, [Q, "has lora_A but not lora_B"]),
            *[
                ({A: torch.ones(RANK, 6).to(dtype)}, [A, str(dtype), "float32"])
                for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
            ],
        ],
    )
    def test_of_wrong_shapes_and_dtypes_name_module_shape_and_what_was_expected(
        self, changes, words, shapes_only, folder
    ):
        tensors = {**good_tensors(), **changes}
        write(folder, tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})

        assert_refused(folder, folder / WEIGHTS, *words, shapes_only=shapes_only)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("name", "side"), [(A, "lora_A"), (B, "lora_B")])
    def test_with_nan_or_inf_anywhere_are_refused(self, value, dtype, name, side, folder):
        tensors = good_tensors(dtype)
        tensors[name][-1, -1] = value
        write(folder, tensors=tensors)

        assert_refused(folder, f"{Q}.{side} holds NaN or Inf")

    @pytest.mark.parametrize("alpha", [1e38, -1e38, 1e300])
    def test_that_become_inf_once_scaled_are_refused(self, alpha, folder):
        tensors = {name: tensor * 100 for name, tensor in good_tensors().items()}
        write(folder, good_config(lora_alpha=alpha), tensors)

        assert_refused(folder, "lora_B holds NaN or Inf as torch.float32")

    @both_ways
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            (f"{PREFIX}{Q}.lora_magnitude_vector", "DoRA"),
            (f"{PREFIX}model.embed_tokens.trainable_tokens_delta", "trainable_token_indices"),
            (f"{PREFIX}{Q}.lora_B.bias", "lora_bias"),
            (f"{PREFIX}{Q}.base_layer.bias", "bias='none'"),
            (f"{PREFIX}{Q}.base_layer.weight", "only lora_A, lora_B"),
            (f"{PREFIX}model.embed_tokens.weight", "save_embedding_layers=False"),
            (f"{PREFIX}model.norm.weight", "only lora_A, lora_B"),
            ("", "only lora_A, lora_B"),
        ],
    )
    def test_that_are_not_loras_are_refused_and_not_passed_over(self, name, why, shapes_only, folder):
        write(folder, tensors={**good_tensors(), name: torch.ones(3)})

        assert_refused(
            folder, folder / WEIGHTS, f"{name} is unsupported LoRA weight", why, shapes_only=shapes_only
        )


class TestTargets:
    @both_ways
    def test_that_the_model_does_not_have_are_listed_beside_those_it_has(self, shapes_only, folder):
        """Incident 8: it loaded, and served the base model."""
        tensors = good_tensors()
        tensors |= {
            f"{PREFIX}transformer.h.{layer}.attn.c_attn.{side}": tensor
            for layer in range(10)
            for side, tensor in (
                ("lora_A.weight", torch.ones(RANK, 6)),
                ("lora_B.weight", torch.ones(8, RANK)),
            )
        }
        write(folder, tensors=tensors)

        assert_refused(
            folder,
            folder / WEIGHTS,
            "transformer.h.0.attn.c_attn",
            "and 2 more",
            *MODEL_MODULES,
            shapes_only=shapes_only,
        )

    @both_ways
    def test_that_share_nothing_with_what_the_server_wraps_are_refused(self, shapes_only, folder):
        """Incident 22: the base model was served in the adapter's name."""
        assert_refused(
            folder,
            Q,
            DOWN,
            "['gate_proj', 'k_proj']",
            expected=["k_proj", "gate_proj"],
            shapes_only=shapes_only,
        )

    @pytest.mark.parametrize("expected", [["q_proj", "v_proj"], ["q_proj", "v_proj", "my_down_proj"], []])
    def test_that_are_only_partly_there_are_refused(self, expected, folder):
        assert_refused(folder, DOWN, expected=expected)


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class TestPickles:
    """Incident 18. Bombs: test_untrusted_adapters."""

    pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

    @pytest.fixture
    def file(self, folder):
        (folder / WEIGHTS).unlink()
        return folder / "adapter_model.bin"

    @both_ways
    @pytest.mark.parametrize("save", [torch.save, lambda x, file: file.write_bytes(pickle.dumps(x))])
    @pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {**good_tensors(), A: p}, lambda p: {p: 1}])
    def test_that_would_run_code_are_refused_and_run_nothing(self, save, wrap, shapes_only, file, tmp_path):
        save(wrap(Payload(tmp_path / "ran")), file)

        assert_refused(file.parent, file, "damaged or holds more than plain tensors", shapes_only=shapes_only)

        assert not (tmp_path / "ran").exists()

    def test_are_refused_without_telling_how_to_run_them_after_all(self, file, tmp_path):
        """torch's own message does: with weights_only=False."""
        torch.save(Payload(tmp_path / "ran"), file)

        with pytest.raises(ValueError) as raised:
            load(file.parent)

        assert "weights_only" not in str(raised.value)
        assert "safetensors" in str(raised.value)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([torch.ones(2)], ["does not hold a dict"]),
            (torch.ones(2), ["does not hold a dict"]),
            ({1: torch.ones(2)}, ["does not hold a dict"]),
            ({A: [1.0, 2.0]}, [A, "not a plain tensor"]),
            *[
                ({A: tensor}, ["holds more than plain tensors"])
                for tensor in (torch.eye(3).to_sparse(), torch.ones(3, 6, device="meta"), QUANTIZED)
            ],
            ({A: torch.ones(1).expand(2**20, 2**20)}, [A, "not a plain tensor"]),
            ({}, ["holds no LoRA weights"]),
            ({**good_tensors(), "": torch.ones(2)}, ["unsupported LoRA weight"]),
        ],
        ids=[
            "list",
            "tensor",
            "number",
            "floats",
            "sparse",
            "meta",
            "quantized",
            "terabytes",
            "empty",
            "nameless",
        ],
    )
    def test_of_other_things_are_refused(self, content, words, file):
        torch.save(content, file)

        assert_refused(file.parent, file, *words)


def flip_bytes(data, rng, until):
    """A copy with one to three bytes of the first `until` changed."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        damaged[rng.randrange(until)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def header_end(data):
    return 8 + struct.unpack("<Q", data[:8])[0]


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
    until = header_end(data) if name == WEIGHTS else len(data)
    rng = random.Random(name)
    refusals = 0

    for _ in range(100):
        (folder / name).write_bytes(flip_bytes(data, rng, until))
        whole, shapes = (is_refused(folder, shapes_only) for shapes_only in (False, True))

        assert whole or not shapes, "what is refused by its shapes must not be served"
        refusals += whole

    assert refusals > 20
