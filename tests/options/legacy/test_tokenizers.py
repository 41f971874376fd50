"""Tokenizers of adapters that add tokens are kept as long as these are in memory, and those asked for last."""

import weakref
from types import SimpleNamespace

import pytest

from minivllm.options.legacy import tokenizers as adapter_tokenizers
from minivllm.options.legacy.tokenizers import AdapterTokenizers, TokenizerFile, load_tokenizer


class Tokenizer:
    pass


class TestTokenizers:
    @pytest.fixture
    def reads(self, monkeypatch):
        reads = []
        monkeypatch.setattr(
            adapter_tokenizers, "load_tokenizer", lambda name, folder: reads.append(folder) or Tokenizer()
        )
        return reads

    @staticmethod
    def file_of(adapter_id):
        return TokenizerFile(f"/{adapter_id}", adapter_id, 1, 1)

    def ask(self, tokenizers, adapter_id):
        return weakref.ref(tokenizers.get(f"a{adapter_id}", self.file_of(adapter_id)))

    def test_of_adapters_that_have_left_memory_are_let_go(self, reads):
        tokenizers = AdapterTokenizers(SimpleNamespace(capacity=2, list_adapters=dict))

        asked = [self.ask(tokenizers, adapter_id) for adapter_id in range(1, 100)]

        assert sum(reference() is not None for reference in asked) <= 3
        assert asked[-1]() is not None

    def test_of_adapters_in_memory_stay_whoever_else_is_asked_for(self, reads):
        in_memory = {i: SimpleNamespace(beside={"tokenizer_file": self.file_of(i)}) for i in (1, 2)}
        tokenizers = AdapterTokenizers(SimpleNamespace(capacity=2, list_adapters=lambda: in_memory))
        kept = [self.ask(tokenizers, adapter_id) for adapter_id in (1, 2)]

        for adapter_id in range(3, 50):
            self.ask(tokenizers, adapter_id)
        again = [self.ask(tokenizers, adapter_id) for adapter_id in (1, 2)]

        assert kept == again
        assert reads == [f"/{i}" for i in range(1, 50)], "each was read once"

    def test_that_were_let_go_are_read_again(self, reads):
        tokenizers = AdapterTokenizers(SimpleNamespace(capacity=1, list_adapters=dict))

        for adapter_id in (1, 2, 3, 1):
            self.ask(tokenizers, adapter_id)

        assert reads == ["/1", "/2", "/3", "/1"]


def test_one_of_a_size_that_no_tokenizer_has_is_not_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(41 * 2**20)

    with pytest.raises(ValueError, match=r"tokenizer\.json has 42991616 bytes, at most 41943040"):
        load_tokenizer("large", str(tmp_path))
