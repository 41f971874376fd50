"""A text that no context holds is refused before a tokenizer reads it, which takes seconds for megabytes."""

import pytest

from minivllm.text.prompts import tokenize


class Tokenizer:
    """Its longest token stands for three characters. read: the texts that it was given"""

    def __init__(self):
        self.read = []

    def get_vocab(self):
        return {"a": 0, "the": 1}

    def __call__(self, text):
        self.read.append(text)
        return {"input_ids": [0] * len(text)}


def test_a_text_longer_than_any_context_is_refused_unread():
    tokenizer = Tokenizer()

    with pytest.raises(ValueError, match="the prompt has 31 characters, more than max_model_len 10 allows"):
        tokenize("the prompt", "a" * 31, tokenizer, max_model_len=10)

    assert not tokenizer.read
    assert len(tokenize("the prompt", "a" * 30, tokenizer, max_model_len=10)) == 30
