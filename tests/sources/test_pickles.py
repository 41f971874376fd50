"""Weights in a pickle: of `adapter_model.bin` only what `torch.save` writes for tensors comes to `torch.load`.

Incident 18. What is anything else is refused before it takes memory, and runs nothing.
"""

import copy
import pickle
import struct
import zipfile

import pytest
import torch

from minivllm.lora.weights_files import read_weights
from minivllm.sources import FILE_FORMATS
from tests.worlds.adapter_folders import WEIGHTS, A, assert_refused, good_tensors, load, set_size, write
from tests.worlds.spoiled_adapters import Payload

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

HOLDS_MORE = "is damaged or holds more than plain tensors"


@pytest.fixture
def file(tmp_path):
    """Where a good adapter has its weights; tests write them."""
    folder = write(tmp_path / "adapter")
    (folder / WEIGHTS).unlink()
    return folder / "adapter_model.bin"


class TestGood:
    def test_pickles_are_read_as_torch_reads_them(self, file):
        whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
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

    def test_a_state_dict_is_read(self, file):
        layer = torch.nn.Linear(3, 4)
        torch.save(layer.state_dict(), file)

        assert torch.equal(read_weights(file, formats=FILE_FORMATS)["weight"], layer.weight)


class Hungry:
    """Unpickled, it asks for a terabyte; torch.load(weights_only=True) gives it."""

    def __reduce__(self):
        return bytearray, (2**40,)


# What is saved in the place of tensors by name -> what is said of it.
CONTENTS = {
    "list": ([torch.ones(2)], "does not hold a dict"),
    "tensor": (torch.ones(2), "does not hold a dict"),
    "number": ({1: torch.ones(2)}, "does not hold a dict"),
    "floats": ({A: [1.0, 2.0]}, f"{A} is not a plain tensor"),
    "terabytes": ({A: torch.ones(1).expand(2**20, 2**20)}, f"{A} is not a plain tensor"),
    "sparse": ({A: torch.eye(3).to_sparse()}, HOLDS_MORE),
    "meta": ({A: torch.ones(3, 6, device="meta")}, HOLDS_MORE),
    "quantized": ({A: torch.quantize_per_tensor(torch.ones(3, 6), 0.1, 0, torch.qint8)}, HOLDS_MORE),
    "a call that asks for memory": ({A: Hungry()}, HOLDS_MORE),
    "one tensor twice": (dict.fromkeys("ab", torch.ones(2**16)), HOLDS_MORE),
    "views of the same numbers": (
        {str(start): numbers[start:] for numbers in [torch.ones(2**16)] for start in range(9)},
        "share more bytes than the file has",
    ),
    "empty": ({}, "holds no LoRA weights"),
    "nameless": ({**good_tensors(), "": torch.ones(2)}, "unsupported LoRA weight"),
}


class TestContent:
    @pytest.mark.parametrize("save", [torch.save, lambda x, file: file.write_bytes(pickle.dumps(x))])
    @pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {**good_tensors(), A: p}, lambda p: {p: 1}])
    def test_that_would_run_code_are_refused_and_run_nothing(self, save, wrap, file, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        save(wrap(Payload()), file)

        assert_refused(file.parent, file, HOLDS_MORE)

        assert not (tmp_path / "ran").exists()

    def test_is_refused_without_telling_how_to_run_it_after_all(self, file):
        """torch's own message does: with weights_only=False."""
        torch.save(Payload(), file)

        with pytest.raises(ValueError) as raised:
            load(file.parent)

        assert "weights_only" not in str(raised.value)
        assert "safetensors" in str(raised.value)

    @pytest.mark.parametrize(("content", "words"), CONTENTS.values(), ids=CONTENTS)
    def test_of_other_kinds_is_refused(self, content, words, file):
        torch.save(content, file)

        assert_refused(file.parent, file, words)


# Operations of a pickle, after its first two bytes.
BOMBS = {
    "a place far away": b"}r\xff\xff\xff\x7fNNs.",
    "tuples of tuples as a key": b"})" + b"q\1h\1\x86" * 60 + b"Ns.",
    "copies": b"})" + b"2\x86" * 60 + b"Ns.",
    "a million marks": b"(" * 1_000_000 + b".",
    "more bytes than a pickle may have": b"(" * 4_000_000 + b".",
    "a hundred thousand times the same name": b"}" + b"X\1\0\0\0aNs" * 120_000 + b".",
    "two gigabytes that are not there": b"}X\1\0\0\0a\x96\0\0\0\x80\0\0\0\0s.",
    "long text": b"}X\xff\xff\xff\x7fabc.",
    "a long int": b"}\x8b\xff\xff\xff\x7fabc.",
}
MILLION = b"J" + struct.pack("<i", 2**20)
# Of a tensor of 4 numbers: what stands in its pickle, and what is put there.
CLAIMS = {
    "storage": {b"K\x04t": MILLION + b"t"},
    "shape": {b"K\x04\x85": MILLION + b"\x85"},
    "stride": {b"K\x04\x85": MILLION + b"\x85", b"K\x01\x85": b"K\x00\x85"},
}
NOTHING = pickle.dumps({}, protocol=2)


def write_archive(file, records, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", compression, compresslevel=1) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def records_of(file, tensors):
    """What torch.save writes for these tensors."""
    torch.save(tensors, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class TestArchives:
    def assert_refused(self, file):
        """Asked for its shapes: they are read as the whole is."""
        __tracebackhide__ = True
        assert_refused(file.parent, file, HOLDS_MORE, ways=["shapes only"])

    @pytest.mark.parametrize("operations", BOMBS.values(), ids=BOMBS)
    def test_whose_operations_are_a_bomb_are_refused(self, operations, file):
        write_archive(file, {"a/data.pkl": b"\x80\x02" + operations})

        self.assert_refused(file)

    @pytest.mark.parametrize("size", [2**28, 2**4], ids=["bomb", "little"])
    def test_that_are_compressed_are_not_unpacked(self, size, file):
        """Nor is their first byte taken for a number's. However little there is to unpack."""
        records = records_of(file, {A: torch.zeros(4)})
        records["adapter_model/data/0"] = bytes(size)
        write_archive(file, records, zipfile.ZIP_DEFLATED)
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("adapter_model/padding", bytes(2**16))  # the file is longer than all its records
        assert file.stat().st_size < 2**21

        self.assert_refused(file)

    @pytest.mark.parametrize("changes", CLAIMS.values(), ids=CLAIMS)
    def test_that_claim_more_than_they_have_are_refused(self, changes, file):
        records = records_of(file, {A: torch.ones(4)})
        for old, new in changes.items():
            assert old in records["adapter_model/data.pkl"]
            records["adapter_model/data.pkl"] = records["adapter_model/data.pkl"].replace(old, new)
        write_archive(file, records)

        assert_refused(file.parent, file)

    def test_whose_records_lie_in_each_other_are_refused(self, file):
        """Each of 400 names of one record would be read into memory of its own."""
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", NOTHING)
            archive.writestr("a/data/0", bytes(2**20))
            whole = archive.getinfo("a/data/0")
            for number in range(1, 400):
                entry = copy.copy(whole)
                entry.filename = f"a/data/{number}"
                archive.filelist.append(entry)
                archive.NameToInfo[entry.filename] = entry

        self.assert_refused(file)

    @pytest.mark.parametrize("second", ["a/DATA.PKL", "b/data.pkl"])
    def test_of_two_pickles_are_refused(self, second, file):
        """What is looked through is one, what torch loads might be the other."""
        write_archive(file, {"a/data.pkl": NOTHING, second: NOTHING})

        self.assert_refused(file)

    def test_with_more_records_than_tensors_could_need_are_refused(self, file):
        more = {f"adapter_model/data/{number}": b"" for number in range(1, 4200)}
        write_archive(file, records_of(file, {A: torch.zeros(4)}) | more)

        self.assert_refused(file)

    def test_that_are_cut_anywhere_are_refused(self, file):
        torch.save(good_tensors(), file)
        data = file.read_bytes()
        for end in range(0, len(data), 97):
            file.write_bytes(data[:end])

            self.assert_refused(file)

    def test_that_are_larger_than_a_pickle_may_be_are_not_read(self, file):
        torch.save(good_tensors(), file)
        set_size(file, 2**40)

        assert_refused(file.parent, file, f"has {2**40} bytes", "safetensors")
