"""Adapters come from anybody: each of these is refused in a second, in little memory and in one sentence."""

import copy
import json
import pickle
import random
import re
import struct
import zipfile
from functools import partial

import pytest
import torch

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.errors import in_one_sentence, one_sentence
from minivllm.lora import checks, limits
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.patterns import Patterns
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.weights_files import read_weights
from minivllm.options.target_parameters import rank_of
from minivllm.sources import FILE_FORMATS
from tests.tools.limits import Peak, TimeLimit
from tests.worlds.adapter_folders import PREFIX, Q, good_config, good_tensors, load, write, write_safetensors

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
HANGS = 60  # seconds of computing; a refusal takes less than one
MOST_MEMORY = 256 * 2**20

both_ways = pytest.mark.parametrize("shapes_only", [False, True], ids=["whole", "shapes only"])


@pytest.fixture
def folder(tmp_path):
    """A good adapter; tests spoil it."""
    return write(tmp_path / "adapter")


def assert_refused(folder, *words, shapes_only=False):
    peak = Peak()
    with TimeLimit(HANGS), pytest.raises(ValueError) as raised:
        load(folder, shapes_only=shapes_only)

    missing = [word for word in words if str(word) not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert peak.growth() < MOST_MEMORY


def helper(**changes):
    return PEFTHelper.from_dict(good_config(**changes), LORA_EXTENSIONS)


def some_pattern(rng, depth=0):
    """A regular expression of short names."""
    if depth > 2 or rng.random() < 0.4:
        return rng.choice(
            [*"abq_.01{}-", r"\.", r"\w", r"\d", r"\W", r"\b", "^", "$", "[a-c]", "[^.]", r"[\w.]"]
        )
    inner = some_pattern(rng, depth + 1)
    more = rng.choice(["", some_pattern(rng, depth + 1)])
    forms = [
        f"{inner}{more}",
        f"({inner}|{more})",
        f"(?:{inner}){{1,2}}",
        f"({inner})*",
        f"{inner}+",
        f"{inner}??",
    ]
    return rng.choice(forms)


class TestPatterns:
    @pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
    @pytest.mark.parametrize(
        "key",
        [
            *(r"(\w|\w\w|_|\.)+[!?]", r"(\w|_|\.|\w\w\w)*[x-z!]", "(.*)*x", "(.+)+y", "(a|a|.)*[!?]"),
            *(r"(\w+\.?)+[!?]", "x?" * 60 + "x" * 60, "(" * 60 + "x" + ")+" * 60),
        ],
    )
    def test_that_keep_re_busy_for_ever_do_not_match_in_no_time(self, field, key):
        adapter = helper(r=6, lora_alpha=6, **{field: {key: 3}})
        ask = partial(rank_of, adapter) if field == "rank_pattern" else adapter.alpha

        with TimeLimit(HANGS):
            assert ask(f"model.layers.0.self_attn.q_proj{'_of_a_name_that_goes_on' * 4}") == 6

    @pytest.mark.parametrize(
        "key",
        [
            "(?:a?b?_?){300}(a.){100}z",
            "(?:.*a){200}.*q",
            ".*a.{500}z",
            "(.*a.{200}|.*b.{200})z",
            "(a|b|_|.){999}",
        ],
    )
    def test_that_are_as_costly_as_they_can_be_are_refused(self, key):
        adapter = helper(alpha_pattern={"x?" * number + key: 3 for number in range(30)})
        names = (f"model.layers.{number}.self_attn.{'ab_' * 160}" for number in range(5000))

        with TimeLimit(HANGS), pytest.raises(ValueError, match=r"alpha_pattern has key .* too long"):
            for name in names:
                adapter.alpha(name)

    @pytest.mark.parametrize("count", [2049, 20_000])
    def test_too_many_are_refused_by_their_number(self, count):
        keys = {f"layers.{number}.q_proj": 3 for number in range(count)}

        with (
            TimeLimit(HANGS),
            pytest.raises(ValueError, match=f"alpha_pattern has {count} entries, at most 2048"),
        ):
            helper(alpha_pattern=keys)

    def test_too_many_that_are_no_plain_names_are_refused_since_each_is_searched(self):
        keys = {f"layers.{number}.(q|v)_proj": 3 for number in range(33)}

        with pytest.raises(ValueError, match="alpha_pattern has 33 keys that are no plain names, at most 32"):
            helper(alpha_pattern=keys)

    def test_one_for_each_linear_of_a_large_model_are_honoured(self):
        names = [f"model.layers.{i}.mlp.{part}_proj" for i in range(126) for part in ("up", "gate", "down")]
        adapter = helper(r=2, lora_alpha=1, alpha_pattern={name: 2 * i for i, name in enumerate(names)})

        with TimeLimit(HANGS):
            assert [adapter.scaling(name, 2) for name in names] == list(range(len(names)))

    @pytest.mark.parametrize(
        ("key", "why"),
        [
            *((".{1000000}" * 20, "RE2 cannot read: invalid repetition size"), ("x" * 257, "at most 256")),
            *(("((a{1,100}){1,100}){1,100}", "RE2 cannot read"), ("(a|bc|.d){900}" * 9, "RE2 cannot read")),
            *((r"(?!.*mlp).*", r"RE2 cannot read: .*\(\?!"), (r"(?<=\.)q_proj", "RE2 cannot read")),
            *(
                (r"(q|k)\1", "RE2 cannot read"),
                (r"q{,2}", "RE2 reads otherwise"),
                ("[[:alpha:]]", "otherwise"),
            ),
            *(
                (r"q\B", "RE2 reads otherwise"),
                (r"\pL", "no regular expression"),
                ("(", "no regular expression"),
            ),
        ],
    )
    def test_that_take_memory_or_are_not_for_re2_are_refused_before_they_match(self, key, why):
        peak = Peak()

        with TimeLimit(HANGS), pytest.raises(ValueError, match=rf"rank_pattern has key .*{why}"):
            helper(rank_pattern={key: 3})

        assert peak.growth() < MOST_MEMORY

    @pytest.mark.parametrize(
        "key",
        [
            *(
                "q_proj",
                "self_attn.q_proj",
                "^model.layers.1.self_attn.q_proj",
                r"layers\.\d+\.mlp\.down_proj",
            ),
            *(
                r".*\.0\..*",
                r"layers\.(0|10)\..*",
                "q_proj|down_proj",
                r"layers\.[0-9]{1,2}\..*proj",
                "proj",
                "",
            ),
            *(
                "(?:0|1|2){2,3}.*",
                "q_proj{e<=3}",
                r"\w+_proj$",
                ".",
                "experts.*",
                r"layers\.(1\d|2[0-3])\.self_attn\.[qkv]_proj",
            ),
        ],
    )
    def test_mean_what_they_mean_to_re(self, key):
        names = [
            f"model.layers.{layer}.{module}"
            for layer in (0, 1, 10, 23)
            for module in ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.3.w1")
        ]
        patterns, expression = Patterns(), rf"(.*\.)?({key})$"

        found = [patterns.match(expression, name) for name in names]

        assert found == [re.match(expression, name) is not None for name in names]

    def test_of_any_kind_mean_what_they_mean_to_re(self):
        rng, judged = random.Random(5), 0
        for _ in range(1500):
            key = "".join(some_pattern(rng) for _ in range(rng.randint(1, 3)))
            expression = rf"(.*\.)?({key})$"
            try:
                patterns = Patterns({key: "rank_pattern"})
            except ValueError:
                continue
            for name in ("", "a.b_q", "abb.q01", "q", ".".join(rng.choice("abq_01") for _ in range(5))):
                judged += 1
                assert patterns.match(expression, name) == (re.match(expression, name) is not None), (
                    key,
                    name,
                )
        assert judged > 5000

    @pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
    def test_with_a_value_of_another_kind_name_the_field_and_the_key(self, field):
        with pytest.raises(ValueError, match=rf"{field}: LoRA \w+ q_proj must be .*, got 'x'"):
            helper(**{field: {"q_proj": "x"}})


class TestConfigs:
    @pytest.mark.parametrize("size", [limits.CONFIG_BYTES + 1, 2**40])
    def test_that_are_too_large_are_not_read(self, size, folder):
        """The terabyte takes no place on the disk."""
        with (folder / CONFIG).open("ab") as file:
            file.truncate(size)

        assert_refused(folder, CONFIG, f"has {size} bytes, more than the 1048576")

    def test_of_exactly_the_limit_are_read(self, folder):
        text = (folder / CONFIG).read_text()
        (folder / CONFIG).write_text(text + " " * (limits.CONFIG_BYTES - len(text)))

        assert len(load(folder).loras) == 3

    def test_with_a_field_twice_are_refused(self, folder):
        text = json.dumps(good_config())
        (folder / CONFIG).write_text(text.replace('"r": ', '"r": 8, "r": '))

        assert_refused(folder, CONFIG, "'r' is there twice")

    @pytest.mark.parametrize("depth", [17, 500, 900])
    def test_with_values_in_values_are_refused(self, depth, folder):
        (folder / CONFIG).write_text(json.dumps(good_config()).replace('"none"', "[" * depth + "]" * depth))

        assert_refused(folder, CONFIG, "not valid JSON", "nested")

    @pytest.mark.parametrize(
        "init", ["something new", "pissa2", "loftq ", "true", 1, 0, 2.5, [], {}, ["gaussian"]]
    )
    def test_with_an_unknown_initialisation_are_refused(self, init):
        with pytest.raises(ValueError, match=r"init_lora_weights .*; train with"):
            helper(init_lora_weights=init).validate_legal(LoRAConfig())

    def test_with_too_many_target_parameters_are_refused(self):
        with pytest.raises(ValueError, match="target_parameters has 2049 entries, at most 2048"):
            helper(target_parameters=["experts.down_proj"] * 2049)


class TestSafetensors:
    @both_ways
    @pytest.mark.parametrize("size", [2**33, 2**40])
    def test_of_a_terabyte_that_no_module_needs_are_refused_by_their_shapes(self, size, shapes_only, folder):
        """Of an engine; without one nobody knows what is needed, and the names are looked at first."""
        entry = {"dtype": "F32", "shape": [4, size // 16], "data_offsets": [0, size]}
        write_safetensors(folder / WEIGHTS, {"base_model.model.other.lora_A.weight": entry}, b"")
        with (folder / WEIGHTS).open("r+b") as file:
            file.truncate((folder / WEIGHTS).stat().st_size + size)

        assert_refused(folder, "other has lora_A but not lora_B", shapes_only=True)

    def test_the_copy_of_the_base_embedding_is_not_read(self, folder):
        header_and_data = (folder / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", header_and_data[:8])[0]
        header, data, size = json.loads(header_and_data[8:end]), header_and_data[end:], 2**34
        entry = {"dtype": "F32", "shape": [2**20, 2**12], "data_offsets": [len(data), len(data) + size]}
        header[f"{PREFIX}model.embed_tokens.base_layer.weight"] = entry
        write_safetensors(folder / WEIGHTS, header, data)
        with (folder / WEIGHTS).open("r+b") as file:
            file.truncate((folder / WEIGHTS).stat().st_size + size)
        peak = Peak()

        with TimeLimit(HANGS):
            lora = load(folder)

        assert len(lora.loras) == 3
        assert peak.growth() < MOST_MEMORY

    @both_ways
    def test_with_too_many_tensors_are_refused_by_their_number(self, shapes_only, folder):
        entry = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
        header = {f"model.layers.{i}.q_proj.lora_A.weight": entry for i in range(100_002)}
        write_safetensors(folder / WEIGHTS, header, b"")

        assert_refused(folder, WEIGHTS, "tensors, at most 100002 are read", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize(
        ("text", "word"),
        [
            (b"[" * 15_000_000, "'[' in its header"),
            (b'{"a":{"shape":[' + b"1," * 5_000_000 + b"1]}}", "',' in its header"),
            (b" " * (limits.HEADER_BYTES + 1), "its header has"),
            (b'{"a":' * 50_000, "nested too deep"),
        ],
        ids=["brackets", "commas", "long", "deep"],
    )
    def test_whose_header_is_a_bomb_are_refused_before_it_is_parsed(self, text, word, shapes_only, folder):
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)

        assert_refused(folder, WEIGHTS, "not a readable safetensors file", word, shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize("second", [[2, 6], [6, 10]], ids=["overlap", "hole"])
    def test_whose_tensors_do_not_follow_each_other_are_refused(self, second, shapes_only, folder):
        offsets = {"first": [0, 4], "second": second}
        header = {name: {"dtype": "F32", "shape": [1], "data_offsets": o} for name, o in offsets.items()}
        write_safetensors(folder / WEIGHTS, header, bytes(second[1]))

        words = (WEIGHTS, "second does not begin where the tensor before it ends")
        assert_refused(folder, *words, shapes_only=shapes_only)

    def test_with_names_of_megabytes_are_refused_by_their_length(self, folder):
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        write_safetensors(folder / WEIGHTS, {"x" * 10_000_000: entry}, bytes(4))

        assert_refused(folder, "a tensor's name has 10000000 characters, at most 512")

    def test_that_shrink_between_check_and_load_are_refused(self, folder, monkeypatch):
        import minivllm.lora.weights_files as module

        judged = module.find_safetensors

        def shrink(*args):
            stored = judged(*args)
            with (folder / WEIGHTS).open("r+b") as again:
                again.truncate((folder / WEIGHTS).stat().st_size - 1)
            return stored

        monkeypatch.setattr(module, "find_safetensors", shrink)

        assert_refused(folder, WEIGHTS, "was cut short while it was read")

    def test_are_read_as_the_library_reads_them(self, folder):
        from safetensors.torch import load_file, save_file

        dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
        generator = torch.Generator().manual_seed(3)
        tensors = {
            f"t{i}": (torch.randn(i + 1, 3 + i, generator=generator) * 9).to(dtype)
            for i, dtype in enumerate(dtypes)
        }
        save_file({**tensors, "scalar": torch.tensor(2.5), "nothing": torch.ones(0, 4)}, folder / WEIGHTS)

        read = read_weights(folder / WEIGHTS, formats=FILE_FORMATS)

        expected = load_file(folder / WEIGHTS)
        assert list(read) == sorted(expected)
        assert all(torch.equal(read[name], expected[name]) for name in expected)
        assert all(read[name].dtype == expected[name].dtype for name in expected)


class TestPickles:
    @pytest.fixture
    def file(self, folder):
        (folder / WEIGHTS).unlink()
        return folder / PICKLE

    def test_are_read_as_torch_reads_them(self, file):
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(8, 6, generator=generator)
        tensors = {
            "plain": whole.clone(),
            "turned": whole.t(),
            "part": whole[2:5, 1:4],
            "every other": whole[::2],
            "half": whole.to(torch.bfloat16),
            "double": whole.double(),
            "nothing": torch.ones(0, 3),
            "number": torch.tensor(2.5),
            "trained": torch.nn.Parameter(whole + 1),
        }
        torch.save(tensors, file)

        read = read_weights(file, formats=FILE_FORMATS)

        expected = torch.load(file, weights_only=True)
        assert list(read) == sorted(expected)
        for name in expected:
            assert read[name].dtype == expected[name].dtype and torch.equal(read[name], expected[name]), name

    def test_of_a_state_dict_are_read(self, file):
        layer = torch.nn.Linear(3, 4)
        torch.save(layer.state_dict(), file)

        assert torch.equal(read_weights(file, formats=FILE_FORMATS)["weight"], layer.weight)

    @both_ways
    @pytest.mark.parametrize("size", [2**40, 2**31])
    def test_that_ask_for_memory_get_none(self, size, shapes_only, file):
        """torch.load(weights_only=True) gives it."""

        class Hungry:
            def __reduce__(self):
                return bytearray, (size,)

        torch.save({A: Hungry()}, file)

        assert_refused(file.parent, PICKLE, "holds more than plain tensors", shapes_only=shapes_only)

    @both_ways
    def test_that_are_compressed_are_not_unpacked(self, shapes_only, file):
        """Nor is their first byte taken for a number's."""
        torch.save({A: torch.zeros(4)}, file)
        with zipfile.ZipFile(file) as archive:
            data = archive.read("adapter_model/data.pkl")
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", data)
            archive.writestr("a/data/0", bytes(2**28), zipfile.ZIP_DEFLATED)
        assert file.stat().st_size < 2**20

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    def test_that_are_compressed_are_refused_however_little_there_is_to_unpack(self, shapes_only, file):
        torch.save(good_tensors(), file)
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data, zipfile.ZIP_DEFLATED)
            archive.writestr("adapter_model/padding", bytes(2**16))  # the file is longer than all its records

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize(
        "operations",
        [
            b"}r\xff\xff\xff\x7fNNs.",
            b"})" + b"q\1h\1\x86" * 60 + b"Ns.",
            b"})" + b"2\x86" * 60 + b"Ns.",
            b"(" * 4_000_000 + b".",
            b"(" * 1_000_000 + b".",
            b"}" + b"X\1\0\0\0aNs" * 120_000 + b".",
            b"}X\1\0\0\0a\x96\0\0\0\x80\0\0\0\0s.",
            b"}X\xff\xff\xff\x7fabc.",
            b"}\x8b\xff\xff\xff\x7fabc.",
        ],
        ids=[
            "a place far away",
            "tuples of tuples as a key",
            "copies",
            "millions of marks",
            "a million marks",
            "a hundred thousand times the same name",
            "two gigabytes that are not there",
            "long text",
            "a long int",
        ],
    )
    def test_whose_operations_are_a_bomb_are_refused(self, operations, shapes_only, file):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02" + operations)

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize("count", [2, 5000])
    def test_that_show_one_storage_many_times_are_refused(self, count, shapes_only, file):
        whole = torch.ones(2**16)
        torch.save({f"{number}.lora_A.weight": whole for number in range(count)}, file)

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    def test_whose_tensors_are_views_of_the_same_numbers_are_refused(self, shapes_only, file):
        whole = torch.ones(2**16)
        torch.save({f"{number}.lora_A.weight": whole[number:] for number in range(9)}, file)

        assert_refused(file.parent, PICKLE, "share more bytes than the file has", shapes_only=shapes_only)

    @both_ways
    def test_that_are_larger_than_a_pickle_may_be_are_not_read(self, shapes_only, file):
        torch.save(good_tensors(), file)
        with file.open("r+b") as again:
            again.truncate(2**40)

        assert_refused(file.parent, PICKLE, f"has {2**40} bytes", "safetensors", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize("where", ["storage", "shape", "stride"])
    def test_that_claim_more_than_they_have_are_refused(self, where, shapes_only, file):
        """A storage of 4 numbers that says it has a million, and shapes of a million numbers in it."""
        torch.save({A: torch.ones(4)}, file)
        million = b"J" + struct.pack("<i", 2**20)
        change = {
            "storage": ((b"K\x04t", million + b"t"),),
            "shape": ((b"K\x04\x85", million + b"\x85"),),
            "stride": ((b"K\x04\x85", million + b"\x85"), (b"K\x01\x85", b"K\x00\x85")),
        }[where]
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in records.items():
                for old, new in change if name.endswith("data.pkl") else ():
                    assert old in data
                    data = data.replace(old, new)
                archive.writestr(name, data)

        assert_refused(file.parent, PICKLE, shapes_only=shapes_only)

    @both_ways
    def test_whose_records_lie_in_each_other_are_refused(self, shapes_only, file):
        """Each of 400 names of one record would be read into memory of its own."""
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", pickle.dumps({}, protocol=2))
            archive.writestr("a/data/0", bytes(2**20))
            whole = archive.getinfo("a/data/0")
            for number in range(1, 400):
                entry = copy.copy(whole)
                entry.filename = f"a/data/{number}"
                archive.filelist.append(entry)
                archive.NameToInfo[entry.filename] = entry

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    @pytest.mark.parametrize("names", [("a/data.pkl", "a/DATA.PKL"), ("a/data.pkl", "b/data.pkl")])
    def test_of_two_pickles_are_refused(self, names, shapes_only, file):
        """What is looked through is one, what torch loads might be the other."""
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, pickle.dumps({}, protocol=2))

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    def test_that_are_cut_anywhere_are_refused(self, shapes_only, file):
        torch.save(good_tensors(), file)
        data = file.read_bytes()
        for end in range(0, len(data), 97):
            file.write_bytes(data[:end])

            assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)

    @both_ways
    def test_with_more_records_than_tensors_could_need_are_refused(self, shapes_only, file):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", pickle.dumps({}, protocol=2))
            for number in range(20_200):
                archive.writestr(f"a/data/{number}", b"")

        assert_refused(file.parent, PICKLE, "damaged or holds more", shapes_only=shapes_only)


class TestMemory:
    def test_numbers_that_are_refused_are_not_converted_first(self):
        """Half as wide in the file as in the engine: a copy of all of them would be thrice the file."""
        size, ones = 48 * 2**20, torch.ones(1, dtype=torch.bfloat16)
        tensors = {
            f"{PREFIX}layers.{i}.q_proj.lora_{side}.weight": ones.expand(shape).contiguous()
            for i in range(2)
            for side, shape in (("A", (3, size // 6)), ("B", (4, 3)))
        }
        tensors[f"{PREFIX}layers.1.q_proj.lora_B.weight"][-1, -1] = float("nan")
        peak = Peak()

        with pytest.raises(ValueError, match=r"layers.1.q_proj.lora_B holds NaN or Inf as torch.float32"):
            LoRAModel.from_lora_tensors(1, tensors, helper(), dtype=torch.float32)

        assert peak.growth() < size


class TestSentences:
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("plain", "plain"),
            ("two\nlines\r\n\tand more", "two lines and more"),
            ("\x1b[31mred", "\\x1b[31mred"),
            ("nul\0", "nul\\x00"),
            ("half \ud800", "half \\ud800"),
            ("left\u202eright", "left\\u202eright"),
            ("é, 語 and 🙂", "é, 語 and 🙂"),
        ],
    )
    def test_have_nothing_in_them_that_a_terminal_obeys(self, text, shown):
        assert one_sentence(text) == shown

    @pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, RuntimeError, UnicodeError])
    def test_keep_the_kind_of_error_that_callers_catch(self, kind):
        @in_one_sentence
        def refuse():
            raise kind("two\nlines" * 1000)

        with pytest.raises(ValueError if issubclass(kind, ValueError) else kind) as refusal:
            refuse()

        assert len(str(refusal.value)) <= 500 and str(refusal.value).isprintable()

    @pytest.mark.parametrize("filler", ["x", "\0", "\ud800", "é", "\n", " "])
    @pytest.mark.parametrize("length", [400, 501, 10**7])
    def test_keep_both_ends_of_a_long_text(self, filler, length):
        shown = one_sentence("adapter 'sql'" + filler * length + "; pass --max-lora-rank 64")

        assert len(shown) <= 500 and shown.isprintable()
        assert shown.startswith("adapter 'sql'") and shown.endswith("; pass --max-lora-rank 64")

    @pytest.mark.parametrize("name", ["x" * 10**6, "a\x1b[2Jb", "\ud800"])
    def test_are_what_a_request_is_refused_in(self, name):
        with pytest.raises(ValueError) as raised:
            LoRARequest(name, 0, "/adapters/sql")

        text = str(raised.value)
        assert len(text) <= 500 and text.isprintable()
        assert "lora_int_id" in text and "got 0" in text


def test_names_are_compared_with_those_of_the_same_layer_where_there_are_many(monkeypatch):
    """A comparison takes 50 µs, and there are four names in a sentence."""
    known = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(48) for j in range(128)]
    compared = []
    monkeypatch.setattr(
        checks,
        "get_close_matches",
        lambda name, with_these, **_: compared.extend(with_these) or with_these[:1],
    )

    near = checks.nearest_names("model.layers.47.mlp.experts.100.up", known)

    assert near == ["model.layers.47.mlp.experts.100.up_proj"]
    assert len(compared) == len(set(compared)) <= 400
