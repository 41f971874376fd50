"""Streamed text against the text itself: whatever its tokens, stop strings and pieces (lab 9.6)."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minivllm.layers.sampler import Logprob
from minivllm.sampling_params import SamplingParams
from minivllm.text.detokenizer import IncrementalDetokenizer, add_decoded_tokens

pytestmark = pytest.mark.lab("9.6")

BYTE_LETTER = dict(
    zip(
        [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173],
        [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))],
    )
)
CORPUS = [
    "Zürich – 20 °C, naïve café",
    "emoji 👩‍👩‍👧 🇨🇭 👍🏽 fin",
    "日本語のテキスト",
    "a aa aaa STOP STO P",
] * 3
LONG = SamplingParams(max_tokens=1000)


def tokenizer_of(pieces: list[bytes]) -> SimpleNamespace:
    """A byte-level tokenizer like GPT-2's that has these pieces as tokens; `.ids` spells them."""
    vocab = {}
    for piece in pieces:
        vocab.setdefault("".join(BYTE_LETTER[byte] for byte in piece), len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    ids = [vocab["".join(BYTE_LETTER[byte] for byte in piece)] for piece in pieces]
    return SimpleNamespace(backend_tokenizer=backend, ids=ids)


def text_after_each_token(pieces: list[bytes]) -> list[str]:
    """What can be known after 0, 1, ... tokens: the text up to the last token that ended a character."""
    known, data = [""], b""
    for piece in pieces:
        data += piece
        try:
            known.append(data.decode())
        except UnicodeDecodeError:
            known.append(known[-1])
    return known


def oracle_stop(known: list[str], params: SamplingParams) -> tuple[str, str | None]:
    """The final text and its stop string: read character by character until a stop string is complete."""
    whole = known[-1]
    for end in range(len(known[min(params.min_tokens, len(known) - 1)]) + 1, len(whole) + 1):
        for stop in sorted(params.stop, key=len, reverse=True):
            if whole[:end].endswith(stop):
                return whole[: end if params.include_stop_str_in_output else end - len(stop)], stop
    return whole, None


def oracle_visible(text: str, stops: list[str]) -> str:
    """All but the longest end that could be the beginning of a stop string."""
    for start in range(len(text)):
        if any(stop != text[start:] and stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text


@st.composite
def texts_in_pieces(draw) -> list[bytes]:
    data = draw(st.text(st.sampled_from("ab é日👍"), min_size=1, max_size=25)).encode()
    cuts = draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=20))
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    pieces=texts_in_pieces(),
    stop=st.lists(st.text(st.sampled_from("ab é日👍"), min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
)
def test_text_ends_at_the_first_complete_stop_string_however_it_is_cut(pieces, stop, min_tokens, include):
    params = SamplingParams(
        max_tokens=100, min_tokens=min_tokens, stop=stop, include_stop_str_in_output=include
    )
    tokenizer, known = tokenizer_of(pieces), text_after_each_token(pieces)
    expected_text, expected_stop = oracle_stop(known, params)
    detokenizer = IncrementalDetokenizer(tokenizer, params)

    streamed, found = "", None
    for number, token_id in enumerate(tokenizer.ids, 1):
        piece, found = detokenizer.update([token_id], finished=number == len(pieces))
        streamed += piece

        assert detokenizer.text == streamed, "the pieces are the text"
        assert expected_text.startswith(streamed), "nothing is shown that is taken back later"
        if found:
            break
        if number < len(pieces):
            held = [] if include else stop
            assert streamed == oracle_visible(known[number], held), "no more is held back than has to be"

    assert (streamed, found) == (expected_text, expected_stop)
    assert found is None or oracle_stop(known[:number], params)[1] is None, "found at the token that ends it"


@pytest.mark.parametrize("together", [1, 2, 5, 100])
def test_tokens_may_come_several_at_a_time(together):
    pieces = [bytes([byte]) for byte in "naïve 👍🏽 text, then END and more".encode()]
    tokenizer = tokenizer_of(pieces)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["END"], max_tokens=100))

    streamed, stop = "", None
    for start in range(0, len(pieces), together):
        piece, stop = detokenizer.update(tokenizer.ids[start : start + together], finished=False)
        streamed += piece
        if stop:
            break

    assert (streamed, stop) == ("naïve 👍🏽 text, then ", "END")


def test_stop_strings_among_the_first_min_tokens_are_passed_over():
    tokenizer = tokenizer_of([b"a.", b"b.", b"c.", b"d"])
    params = SamplingParams(stop=".", min_tokens=2)

    assert IncrementalDetokenizer(tokenizer, params).update(tokenizer.ids, finished=False) == ("a.b.c", ".")
    assert IncrementalDetokenizer(tokenizer, params).update([0, 1], finished=True) == ("a.b.", None)


# Tokens, stop strings, whether the request finishes with the last token; what is shown after each, and what was found.
SHOWN = {
    "cut at a stop string inside a token": ([b"one ", b"two;three"], [";"], False, ["one ", "two"], ";"),
    "half a stop string, once it cannot become whole": (
        [b"a\n", b"\nb", b"\n", b"x"],
        ["\n\n\n"],
        False,
        ["a", "\n\nb", "", "\nx"],
        None,
    ),
    "an end that was held back, when the request finishes": (
        [b"all", b" EN"],
        ["END"],
        True,
        ["all", " EN"],
        None,
    ),
    # Behind "hello a" the text ends, though its end might have begun the other stop string.
    "all that is before a stop string": ([b"hello", b" a"], ["a", " ab"], False, ["hello", " "], "a"),
    "characters, whole": (
        [bytes([byte]) for byte in "é日".encode()],
        [],
        False,
        ["", "é", "", "", "日"],
        None,
    ),
    # A text that is cut amid a character ends with a replacement character, which is a text like any other.
    "amid a character, what the tokenizer shows": (
        [b"ok ", b"\xf0\x9f", b"\x91"],
        [],
        True,
        ["ok ", "", "\ufffd"],
        None,
    ),
    "bytes that are left and complete a stop string": (
        [b"ok", b" ", b"\xf0\x9f"],
        [" \ufffd"],
        True,
        ["ok", "", ""],
        " \ufffd",
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_after_each_token_is_shown(case):
    pieces, stop, finishes, expected, expected_stop = SHOWN[case]
    tokenizer = tokenizer_of(pieces)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=stop, max_tokens=100))

    last = len(pieces) - 1
    updates = [detokenizer.update([t], finished=finishes and i == last) for i, t in enumerate(tokenizer.ids)]

    assert [shown for shown, _ in updates] == expected
    assert [found for _, found in updates] == [None] * last + [expected_stop]
    assert detokenizer.text == "".join(expected)


@pytest.mark.parametrize(("last", "shown"), [(b" a", " a"), (b"\xf0\x9f", "\ufffd")])
def test_what_is_held_back_when_a_stop_token_comes_is_shown(last, shown):
    """A stop token has no text, and no text comes after it: what is held back is shown now or never."""
    tokenizer = tokenizer_of([b"hello", last, b"<end>"])
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=" ab", stop_token_ids=[2]))

    pieces = [detokenizer.update([i], finished=i == 2, stop_terminated=i == 2)[0] for i in tokenizer.ids]

    assert pieces == ["hello", "", shown]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text_is_left_out_unless_asked_for(include):
    tokenizer = tokenizer_of([b"yes", b".", b"\xf0"])
    params = SamplingParams(stop_token_ids=[1], include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(tokenizer, params)

    detokenizer.update([0], finished=False)
    piece, stop = detokenizer.update([1], finished=True, stop_terminated=True)

    assert (piece, stop) == ("." if include else "", None)


def test_without_detokenize_there_is_no_text():
    tokenizer = tokenizer_of([b"yes"])

    for detokenizer in (
        IncrementalDetokenizer(tokenizer, SamplingParams(detokenize=False)),
        IncrementalDetokenizer(None, SamplingParams()),
    ):
        assert detokenizer.update([0], finished=True) == ("", None)
        assert detokenizer.text == ""


def test_a_tokenizer_without_fast_backend_is_refused_by_name():
    with pytest.raises(ValueError, match=r"SimpleNamespace.*tokenizer\.json"):
        IncrementalDetokenizer(SimpleNamespace(), SamplingParams())


@pytest.fixture(scope="module")
def byte_level_tokenizer():
    """A small trained GPT-2-like tokenizer in transformers' clothes, with special tokens."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|user|>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture(scope="module")
def byte_fallback_tokenizer():
    """A Llama-2-like tokenizer: words with a mark for the space before, single bytes for the rest."""
    from transformers import PreTrainedTokenizerFast

    words = ["▁", "a", "b", "▁hello", "▁wo", "rld", "é", "👍"]
    vocab = {
        token: i for i, token in enumerate(["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def random_streams(vocab_size: int, count: int = 300) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 15))] for _ in range(count)]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streams_of_any_tokens_add_up_to_what_transformers_decodes(byte_level_tokenizer, skip_special_tokens):
    params = SamplingParams(skip_special_tokens=skip_special_tokens)

    for ids in random_streams(len(byte_level_tokenizer)):
        detokenizer = IncrementalDetokenizer(byte_level_tokenizer, params)
        streamed = "".join(detokenizer.update([t], finished=i == len(ids))[0] for i, t in enumerate(ids, 1))

        assert streamed == byte_level_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_byte_fallback_text_with_emoji_adds_up_to_what_transformers_decodes(byte_fallback_tokenizer):
    to_id = byte_fallback_tokenizer.convert_tokens_to_ids
    byte_ids = [to_id(f"<0x{byte:02X}>") for byte in "日🇨🇭".encode()]
    ids = [to_id("▁hello"), *byte_ids, to_id("▁wo"), to_id("rld"), to_id("</s>")]
    detokenizer = IncrementalDetokenizer(byte_fallback_tokenizer, LONG)

    streamed = [detokenizer.update([t], finished=i == len(ids))[0] for i, t in enumerate(ids, 1)]

    assert (
        "".join(streamed)
        == byte_fallback_tokenizer.decode(ids, skip_special_tokens=True)
        == "hello日🇨🇭 world"
    )


def test_bytes_that_are_no_text_never_break_a_stream(byte_fallback_tokenizer):
    for ids in random_streams(len(byte_fallback_tokenizer)):
        detokenizer = IncrementalDetokenizer(byte_fallback_tokenizer, LONG)
        streamed = "".join(detokenizer.update([t], finished=i == len(ids))[0] for i, t in enumerate(ids, 1))

        assert streamed == detokenizer.text
        assert len(streamed) <= len(byte_fallback_tokenizer.decode(ids))


def test_text_goes_on_behind_bytes_that_were_no_text(byte_fallback_tokenizer):
    to_id = byte_fallback_tokenizer.convert_tokens_to_ids
    ids = [to_id(token) for token in ("<0x48>", "<0xE6>", "▁wo", "▁hello", "rld")]
    detokenizer = IncrementalDetokenizer(byte_fallback_tokenizer, LONG)

    streamed = [detokenizer.update([t], finished=False)[0] for t in ids]

    assert streamed == ["H", "", "\ufffd wo", " hello", "rld"]


def test_logprobs_get_their_tokens_text(byte_level_tokenizer):
    end, letter = byte_level_tokenizer.convert_tokens_to_ids(["<|end|>", "Z"])
    logprobs = {end: Logprob(-0.5, 1), letter: Logprob(-1.5, 2)}

    add_decoded_tokens(byte_level_tokenizer, logprobs)

    assert {t: logprob.decoded_token for t, logprob in logprobs.items()} == {end: "<|end|>", letter: "Z"}


def test_the_demo_models_tokenizer_streams_its_own_text():
    from transformers import AutoTokenizer

    from minivllm.models.demo_model import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(progress=False))
    text = 'SELECT "naïve" FROM t; -- 👩‍👩‍👧 日本語\n{"größe": 3}\n\nUser: never shown'
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["\n\nUser:"], max_tokens=100))

    streamed, stop = "", None
    for token_id in ids:
        piece, stop = detokenizer.update([token_id], finished=False)
        streamed += piece
        if stop:
            break

    assert (streamed, stop) == (text[: text.index("\n\nUser:")], "\n\nUser:")
