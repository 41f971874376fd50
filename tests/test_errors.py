"""Sentences that people read have nothing in them that a terminal obeys, and are short, whatever an adapter brings."""

import pytest

from minivllm.errors import in_one_sentence, one_sentence
from minivllm.lora import checks
from minivllm.lora.request import LoRARequest

SHOWN = {
    "plain": "plain",
    "two\nlines\r\n\tand more": "two lines and more",
    "\x1b[31mred": "\\x1b[31mred",
    "nul\0": "nul\\x00",
    "half \ud800": "half \\ud800",
    "left\u202eright": "left\\u202eright",
    "é, 語 and 🙂": "é, 語 and 🙂",
}


@pytest.mark.parametrize(("text", "shown"), SHOWN.items())
def test_have_nothing_in_them_that_a_terminal_obeys(text, shown):
    assert one_sentence(text) == shown


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, RuntimeError, UnicodeError])
def test_keep_the_kind_of_error_that_callers_catch(kind):
    @in_one_sentence
    def refuse():
        raise kind("two\nlines" * 1000)

    with pytest.raises(ValueError if issubclass(kind, ValueError) else kind) as refusal:
        refuse()

    assert len(str(refusal.value)) <= 500 and str(refusal.value).isprintable()


@pytest.mark.parametrize("filler", ["x", "\0", "\ud800", "é", "\n", " "])
@pytest.mark.parametrize("length", [400, 501, 10**6])
def test_keep_both_ends_of_a_long_text(filler, length):
    shown = one_sentence("adapter 'sql'" + filler * length + "; pass --max-lora-rank 64")

    assert len(shown) <= 500 and shown.isprintable()
    assert shown.startswith("adapter 'sql'") and shown.endswith("; pass --max-lora-rank 64")


@pytest.mark.parametrize("name", ["x" * 10**6, "a\x1b[2Jb", "\ud800"])
def test_are_what_a_request_is_refused_in(name):
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
