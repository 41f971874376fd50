"""The demo model's folder: made whole or not at all, made once, and the same model as the GGUF file."""

import pytest

from minivllm.models import demo_model
from minivllm.models.demo_model import GGUF_FILE, demo_model_path, find_gguf

PROMPTS = ["The capital of France is", "In  2024, 1,250 people"]


@pytest.fixture(scope="module")
def folder():
    return demo_model_path(progress=False)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def conversions(monkeypatch):
    """Replaces the conversion by one that writes a single file; the list holds the folders it was given."""
    calls = []

    def convert(gguf, folder, dtype, progress):
        calls.append(folder)
        (folder / "config.json").write_text(dtype)

    monkeypatch.setattr(demo_model, "_convert", convert)
    return calls


def greedy(model, tokenizer, n):
    """The n tokens the model continues each prompt with."""
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=n, do_sample=False, pad_token_id=0)
        answers.append(output[0, inputs.input_ids.shape[1] :].tolist())
    return answers


@pytest.mark.nightly
def test_the_folder_generates_what_the_gguf_file_generates(folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    gguf = find_gguf()

    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=config, dtype=torch.float32
    )

    assert greedy(converted, tokenizer, 8) == greedy(original, tokenizer, 8)


def test_the_tokenizer_ends_turns_and_splits_digits_as_the_model_was_trained(folder):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Hi"}]

    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id]
    assert AutoConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    assert tokenizer.tokenize("in  2024") == ["in", "ĠĠ", "2", "0", "2", "4"]


def test_a_second_call_does_not_convert_again(empty_cache, conversions):
    first = demo_model_path(progress=False)

    second = demo_model_path(progress=False)

    assert second == first == empty_cache / "SmolLM2-135M-Instruct-float32"
    assert len(conversions) == 1


def test_each_dtype_has_its_own_folder(empty_cache, conversions):
    paths = [demo_model_path(progress=False, dtype=dtype) for dtype in ("float32", "bfloat16")]

    assert [(path / "config.json").read_text() for path in paths] == ["float32", "bfloat16"]


def test_a_failed_conversion_leaves_nothing(empty_cache, monkeypatch):
    def fail(gguf, folder, dtype, progress):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_convert", fail)

    with pytest.raises(OSError, match="disk full"):
        demo_model_path(progress=False)

    assert list(empty_cache.iterdir()) == []


def test_a_process_that_was_overtaken_takes_the_other_ones_folder(empty_cache, monkeypatch):
    finished = empty_cache / "SmolLM2-135M-Instruct-float32"

    def convert(gguf, folder, dtype, progress):
        (folder / "config.json").write_text("ours")
        finished.mkdir()
        (finished / "config.json").write_text("theirs")

    monkeypatch.setattr(demo_model, "_convert", convert)

    path = demo_model_path(progress=False)

    assert (path / "config.json").read_text() == "theirs"
    assert list(empty_cache.iterdir()) == [finished]


def test_a_missing_package_is_named_with_the_command_that_brings_it(empty_cache, monkeypatch):
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package")

    with pytest.raises(ModuleNotFoundError, match=r"'no_such_package'.*make setup"):
        demo_model_path(progress=False)

    assert list(empty_cache.iterdir()) == []


def test_a_package_without_the_file_is_reported(empty_cache, monkeypatch):
    monkeypatch.setattr(demo_model, "GGUF_FILE", "other-" + GGUF_FILE)

    with pytest.raises(FileNotFoundError, match=r"other-.*\.gguf is missing; run"):
        demo_model_path(progress=False)


def test_an_unknown_dtype_is_refused(empty_cache):
    with pytest.raises(ValueError, match=r"'int8'.*float32, bfloat16"):
        demo_model_path(progress=False, dtype="int8")
