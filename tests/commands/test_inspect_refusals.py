"""`minivllm inspect` explains every refusal: exit status 1 and a sentence for each thing that is wrong.

A case for every row of what the engine does not serve: folders that PEFT wrote, and good ones that are damaged.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from minivllm.cli import app
from tests.worlds.engines import tiny_world

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj"
A0, B0 = (f"base_model.model.{Q0}.lora_{side}.weight" for side in "AB")


@pytest.fixture
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def inspect(world, folder, *options):
    """What the command prints as text and as JSON; nothing goes to stderr, no warning and no log."""
    results = []
    for form in ([], ["--json"]):
        with warnings.catch_warnings(action="error"):
            result = CliRunner().invoke(
                app, ["inspect", str(folder), "--model", str(world.base), *options, *form]
            )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.stderr == ""
        results.append(result)
    text, report = results[0].stdout, json.loads(results[1].stdout)
    assert results[0].exit_code == results[1].exit_code == (0 if report["fits"] else 1)
    assert report["path"] == str(folder) and report["model"] == str(world.base)
    return text, report


def assert_refused(world, folder, *reasons, options=()):
    """A sentence for each of `reasons`, the words that it must hold, in this order and no other."""
    text, report = inspect(world, folder, *options)

    assert not report["fits"]
    assert len(report["reasons"]) == len(reasons), report["reasons"]
    for found, words in zip(report["reasons"], reasons):
        missing = [word for word in words if word not in found]
        assert not missing, f"{missing} not in: {found}"
        assert "\n" not in found and "Traceback" not in found
    first, *rest = text.splitlines()
    verdict = [f"does not fit {world.base}:", *(f"- {reason}" for reason in report["reasons"])]
    assert first == str(folder)
    assert rest[-len(verdict) :] == verdict
    description = rest[: -len(verdict)]
    assert bool(description) == ("targets" in report)
    assert not description or re.match(r"(rs)?LoRA \(alpha", description[0])


def train(folder: Path, base: Path, config: object) -> Path:
    """What PEFT saves for a config."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        get_peft_model(model, config).save_pretrained(folder)
    return folder


# A LoraConfig of PEFT's -> what is said of what it saves.
TRAINED = {
    "DoRA": ({"use_dora": True}, ["does not yet support DoRA", "train without use_dora"]),
    "modules to save": ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "['lm_head']"]),
    "trained tokens": ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices"]),
    "bias all": ({"bias": "all"}, ["bias 'all'", "train with bias='none'"]),
    "bias lora_only": ({"bias": "lora_only"}, ["bias 'lora_only'", "train with bias='none'"]),
    "PiSSA": ({"init_lora_weights": "pissa"}, ["init_lora_weights 'pissa'", "train with another"]),
    "OLoRA": ({"init_lora_weights": "olora"}, ["init_lora_weights 'olora'", "train with another"]),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, ["layer_replication"]),
    "rank": ({"r": 80}, ["LoRA rank 80 is greater than max_lora_rank 64", "--max-lora-rank 80"]),
    "rank of a pattern": ({"rank_pattern": {"v_proj": 72}}, ["rank 72 is greater", "--max-lora-rank 72"]),
}


@pytest.mark.parametrize("what", TRAINED)
def test_what_peft_trains_and_the_engine_does_not_serve(world, tmp_path, what):
    from peft import LoraConfig

    changes, words = TRAINED[what]
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}

    folder = train(tmp_path / "adapter", world.base, LoraConfig(**options))

    assert_refused(world, folder, words)


@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING"])
def test_another_kind_of_adapter(world, tmp_path, kind):
    from peft import IA3Config, PromptTuningConfig

    config = (
        IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        if kind == "IA3"
        else PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )

    folder = train(tmp_path / "adapter", world.base, config)

    assert_refused(world, folder, [CONFIG, f"peft_type '{kind}'", "only LORA"])


# A change to the config of a good adapter -> what is said of it.
CONFIGS = {
    "no r": ({"r": ...}, [CONFIG, "Missing required configuration fields: r"]),
    "nothing in it": (
        {"r": ..., "lora_alpha": ..., "target_modules": ...},
        ["Missing required", "lora_alpha, r, target_modules"],
    ),
    "rank 0": ({"r": 0}, [CONFIG, "rank r must be an int from 1", "got 0"]),
    "rank as text": ({"r": "8"}, [CONFIG, "rank r must be", "got '8'"]),
    "alpha as text": ({"lora_alpha": "16"}, [CONFIG, "alpha lora_alpha must be", "got '16'"]),
    "pattern is a list": ({"rank_pattern": ["q_proj"]}, [CONFIG, "rank_pattern must map", "['q_proj']"]),
    "pattern is no regex": ({"alpha_pattern": {"(": 4}}, [CONFIG, "alpha_pattern has key '('"]),
    "rsLoRA as text": ({"use_rslora": "yes"}, [CONFIG, "use_rslora must be true or false", "'yes'"]),
    "peft_type of the future": ({"peft_type": "XLORA9"}, [CONFIG, "peft_type 'XLORA9'", "only LORA"]),
    "CorDA": ({"init_lora_weights": "corda"}, ["init_lora_weights 'corda'", "changes the base model"]),
    "LoftQ": ({"init_lora_weights": "loftq"}, ["init_lora_weights 'loftq'", "changes the base model"]),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, ["init_lora_weights 'lora_ga'", "changes the base"]),
    "PiSSA in steps": ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights 'pissa_niter_4'"]),
    "QALoRA": ({"use_qalora": True}, ["use_qalora"]),
    "BD-LoRA": ({"use_bdlora": {"blocks": 4}}, ["use_bdlora"]),
    "Arrow": ({"arrow_config": {"top_k": 2}}, ["arrow_config"]),
    "KaSA": ({"kasa_config": {"beta": 1}}, ["kasa_config"]),
    "MonteCLoRA": ({"monteclora_config": {"samples": 1}}, ["monteclora_config"]),
    "another rank than the tensors": ({"r": 7}, [Q0, "has rank 4", "gives only [7]", "1 more layer)"]),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_is_not_served(world, tmp_path, what):
    changes, words = CONFIGS[what]
    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")

    edit_config(folder, **changes)

    v_proj = [Q0.replace("q_proj", "v_proj")]
    assert_refused(world, folder, words, *([v_proj] if what == "another rank than the tensors" else []))


def edit_config(folder, **changes):
    """`...` takes a field out."""
    config = {**json.loads((folder / CONFIG).read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(kept))


def edit_weights(folder, change):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def with_a0(shape_or_tensor):
    def change(weights):
        tensor = shape_or_tensor
        return {**weights, A0: tensor if isinstance(tensor, torch.Tensor) else torch.ones(tensor)}

    return lambda folder: edit_weights(folder, change)


def with_more(name, tensor):
    return lambda folder: edit_weights(folder, lambda weights: {**weights, name: tensor})


def renamed(old, new):
    return lambda folder: edit_weights(
        folder, lambda weights: {name.replace(old, new): weight for name, weight in weights.items()}
    )


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


class Payload:
    """Unpickled, it makes a folder where it lies."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def pickled(content):
    def spoil(folder):
        (folder / WEIGHTS).unlink()
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(content))

    return spoil


def saved(content):
    def spoil(folder):
        (folder / WEIGHTS).unlink()
        torch.save(content, folder / "adapter_model.bin")

    return spoil


def without_b(folder):
    edit_weights(folder, lambda weights: {n: w for n, w in weights.items() if n != B0})


# What is done to a good folder -> what is said of it.
DAMAGED = {
    "no folder": (shutil.rmtree, ["adapter folder '", "adapter' does not exist"]),
    "a file": (
        lambda f: f.rename(f.with_name("was")) and f.touch(),
        ["adapter' is a file", "give the folder"],
    ),
    "no config": (lambda f: (f / CONFIG).unlink(), ["has no adapter_config.json"]),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["has no weights file", WEIGHTS]),
    "config is no JSON": (write(CONFIG, b"{"), [CONFIG, "is not valid JSON"]),
    "config is not UTF-8": (write(CONFIG, b"\xff\xfe"), [CONFIG, "is not valid JSON"]),
    "config is a list": (write(CONFIG, b"[]"), [CONFIG, "holds a list", "expected a JSON object"]),
    "weights cut short": (cut, [WEIGHTS, "is not a readable safetensors file"]),
    "weights empty": (write(WEIGHTS, b""), [WEIGHTS, "is not a readable safetensors file"]),
    "weights not fetched": (
        write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
        [WEIGHTS, "is not a readable safetensors file"],
    ),
    "a pickle that runs code": (
        pickled({A0: Payload()}),
        ["adapter_model.bin", "damaged or holds more than plain tensors", "save the adapter as safetensors"],
    ),
    "a pickle of a list": (saved([1, 2]), ["adapter_model.bin", "does not hold a dict of tensors"]),
    "a pickle of numbers": (saved({A0: 1.5}), ["adapter_model.bin", A0, "is not a plain tensor"]),
    "no tensors": (lambda f: save_file({}, f / WEIGHTS), ["holds no LoRA weights"]),
    "rank 0": (with_a0((0, 48)), [A0, "at least rank 1", "(0, 48)"]),
    "a vector": (with_a0((4,)), [A0, "must be a matrix", "(4,)"]),
    "A too wide": (with_a0((4, 49)), [Q0, "lora_A (4, 49)", "expected (4, 48)"]),
    "A of another rank": (with_a0((5, 48)), [Q0, "(5, 48)", "differ in rank"]),
    "A upside down": (with_a0((48, 4)), [Q0, "(48, 4)", "differ in rank"]),
    "A of integers": (with_a0(torch.ones(4, 48, dtype=torch.int8)), [A0, "torch.int8", "float32"]),
    "A of float8": (
        with_a0(torch.ones(4, 48).to(torch.float8_e4m3fn)),
        [A0, "torch.float8_e4m3fn", "float32"],
    ),
    "NaN": (with_a0(torch.full((4, 48), float("nan"))), [f"{Q0}.lora_A holds NaN or Inf"]),
    "too large for float32": (
        with_a0(torch.full((4, 48), 1e200, dtype=torch.float64)),
        [f"{Q0}.lora_A holds NaN or Inf as torch.float32"],
    ),
    "no B": (without_b, [Q0, "has lora_A but not lora_B"]),
    "a name with and without prefix": (with_more(f"{Q0}.lora_A.weight", torch.ones(4, 48)), ["there twice"]),
    "DoRA in the tensors alone": (
        with_more(f"base_model.model.{Q0}.lora_magnitude_vector", torch.ones(48)),
        ["lora_magnitude_vector is unsupported LoRA weight", "train without use_dora"],
    ),
    "trained tokens in the tensors alone": (
        with_more("base_model.model.model.embed_tokens.trainable_tokens_delta", torch.ones(2, 48)),
        ["trainable_tokens_delta is unsupported", "train without trainable_token_indices"],
    ),
    "a whole embedding": (
        with_more("base_model.model.model.embed_tokens.weight", torch.ones(97, 48)),
        ["embed_tokens.weight is unsupported", "save_embedding_layers=False"],
    ),
    "a bias of the base": (
        with_more(f"base_model.model.{Q0}.base_layer.bias", torch.ones(48)),
        ["base_layer.bias is unsupported", "train with bias='none'"],
    ),
    "a layer of the base": (
        with_more("base_model.model.model.norm.weight", torch.ones(48)),
        ["model.norm.weight is unsupported", "only lora_A, lora_B"],
    ),
    "names of another model": (
        renamed("q_proj", "query"),
        ["that the model does not offer", f"'{Q0[:-6]}query' (nearest: {Q0}", "layers.1.self_attn.query"],
    ),
    "layers that there are not": (
        renamed("layers.1", "layers.7"),
        ["does not offer", "'model.layers.7.self_attn.q_proj' (nearest: ", "model.layers.7.self_attn.v_proj"],
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_folder_that_is_damaged(world, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    spoil, words = DAMAGED[what]
    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")

    spoil(folder)

    assert_refused(world, folder, words)
    assert not (tmp_path / "ran").exists(), "code from a pickle ran"


class TestAllAtOnce:
    @pytest.fixture
    def folder(self, world, tmp_path):
        return shutil.copytree(world.path("all"), tmp_path / "adapter")

    def test_what_the_config_asks_for_is_listed_beside_a_file_that_cannot_be_read(self, world, folder):
        edit_config(folder, use_dora=True, modules_to_save=["lm_head"], r=100)
        cut(folder)

        assert_refused(
            world,
            folder,
            ["modules_to_save", "DoRA", "--max-lora-rank 100"],
            [WEIGHTS, "is not a readable"],
        )

    def test_two_files_that_are_missing(self, world, folder):
        (folder / CONFIG).unlink()
        (folder / WEIGHTS).unlink()

        assert_refused(world, folder, [f"no {CONFIG}"], ["no weights file"])

    def test_modules_that_are_wrong_in_different_ways(self, world, folder):
        change = {
            A0: torch.ones(8, 7),
            f"base_model.model.{Q0.replace('q_proj', 'k_proj')}.lora_A.weight": torch.ones(8, 48) * torch.nan,
            "base_model.model.model.layers.0.mlp.expert_proj.lora_A.weight": torch.ones(8, 48),
            "base_model.model.model.layers.0.mlp.expert_proj.lora_B.weight": torch.ones(48, 8),
        }
        edit_weights(folder, lambda weights: {**weights, **change})

        _, report = inspect(world, folder)

        said = " | ".join(report["reasons"])
        assert len(report["reasons"]) == 3
        assert "k_proj.lora_A holds NaN" in said
        assert f"{Q0} has lora_A (8, 7)" in said
        assert "'model.layers.0.mlp.expert_proj' (nearest: " in said

    def test_a_rank_that_is_too_high_does_not_hide_what_is_wrong_besides(self, world, folder):
        edit_weights(folder, lambda weights: {n: w * torch.nan if n == A0 else w for n, w in weights.items()})

        assert_refused(
            world,
            folder,
            ["rank 8 is greater than max_lora_rank 4", "--max-lora-rank 8"],
            [f"{Q0}.lora_A holds NaN"],
            options=["--max-lora-rank", "4"],
        )

    def test_the_same_in_every_layer_is_said_once(self, world, folder):
        edit_weights(folder, lambda weights: {n: w * torch.nan for n, w in weights.items()})

        _, report = inspect(world, folder)

        assert len(report["reasons"]) == 7, "one for each linear of a layer"
        assert all(
            "layers.0." in reason and "(and so in 1 more layer)" in reason for reason in report["reasons"]
        )


def test_what_the_model_passes_over_is_not_held_against_the_adapter(world, tmp_path, monkeypatch):
    from minivllm.models.llama import LlamaForCausalLM

    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")
    with_more("base_model.model.mtp.layers.0.q_proj.lora_A.weight", torch.ones(2, 2))(folder)
    with_more("base_model.model.lm_head.base_layer.weight", torch.ones(97, 48))(folder)
    monkeypatch.setattr(LlamaForCausalLM, "lora_skip_prefixes", ["mtp."], raising=False)

    assert inspect(world, folder)[1]["reasons"] == []

    without_b(folder)
    assert_refused(world, folder, [Q0, "has lora_A but not lora_B"])


def adding_tokens(count=3, width=48, name="input_embeddings", value=1.0):
    """What vLLM up to 0.10 read beside an adapter."""
    tensors = {name: torch.full((count, width), value)}
    return lambda folder: save_file(tensors, folder / "new_embeddings.safetensors")


# A LoraConfig of PEFT's, what is done to what it saved, and the option that admits the adapter.
ADMITTED = {
    "rank": ({"r": 80}, None, "--max-lora-rank 80"),
    "context": ({}, lambda f: edit_config(f, context_length=1000), "--long-lora-scaling-factors 4.0"),
    "bias": ({"lora_bias": True}, None, "--enable-lora-bias"),
    "added tokens": ({}, adding_tokens(3), "--lora-extra-vocab-size 3"),
}


@pytest.mark.parametrize("what", ADMITTED)
def test_an_option_that_would_admit_the_adapter_is_named_and_does(world, tmp_path, what):
    from peft import LoraConfig

    trained, change, option = ADMITTED[what]
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **trained})
    folder = train(tmp_path / "adapter", world.base, config)
    if change:
        change(folder)

    assert_refused(world, folder, [f"pass {option}"])

    _, report = inspect(world, folder, *option.split())
    assert report["reasons"] == []


BIAS_OF_Q0 = f"base_model.model.{Q0}.lora_B.bias"
EXTRA = ["--lora-extra-vocab-size", "3"]

# What is done to an adapter with a bias on B, or to one that adds tokens; options; and what is said of it.
OF_OPTIONS = {
    "a bias of NaN": (
        with_more(BIAS_OF_Q0, torch.full((48,), float("nan"))),
        ["--enable-lora-bias"],
        [f"{Q0}.lora_B.bias holds NaN or Inf"],
    ),
    "a bias too wide": (
        with_more(BIAS_OF_Q0, torch.ones(49)),
        ["--enable-lora-bias"],
        [Q0, "lora_B.bias (49,)", "expected (48,)"],
    ),
    "a bias that the config denies": (
        lambda f: edit_config(f, lora_bias=False),
        ["--enable-lora-bias"],
        [f"{BIAS_OF_Q0} is unsupported LoRA weight", "lora_bias=False"],
    ),
    "tokens of another width": (adding_tokens(3, 47), EXTRA, ["input_embeddings", "(3, 47)", "48"]),
    "tokens of NaN": (adding_tokens(value=float("nan")), EXTRA, ["input_embeddings", "NaN or Inf"]),
    "tokens under another name": (
        adding_tokens(name="embeddings"),
        EXTRA,
        ["new_embeddings.safetensors' holds embeddings", "only input_embeddings and output_embeddings"],
    ),
    "tokens in a file that is damaged": (
        write("new_embeddings.safetensors", b"{"),
        EXTRA,
        ["new_embeddings.safetensors' is not a readable safetensors file"],
    ),
}


@pytest.mark.parametrize("what", OF_OPTIONS)
def test_what_an_option_admits_may_still_be_damaged(world, tmp_path, what):
    from peft import LoraConfig

    spoil, options, words = OF_OPTIONS[what]
    trained = {"lora_bias": True} if "bias" in what else {}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], **trained)
    folder = train(tmp_path / "adapter", world.base, config)

    spoil(folder)

    assert_refused(world, folder, words, options=options)


def test_every_option_that_is_lacking_is_named_at_once_beside_what_is_damaged(world, tmp_path):
    from peft import LoraConfig

    config = LoraConfig(r=80, lora_alpha=8, target_modules=["q_proj"], lora_bias=True)
    folder = train(tmp_path / "adapter", world.base, config)
    edit_config(folder, context_length=1000)
    adding_tokens(3)(folder)
    with_a0(torch.full((80, 48), float("nan")))(folder)

    assert_refused(
        world,
        folder,
        ["--max-lora-rank 80", "--long-lora-scaling-factors 4.0", "--enable-lora-bias"],
        ["adds 3 tokens", "--lora-extra-vocab-size 3"],
        [f"{Q0}.lora_A holds NaN"],
    )


def test_an_adapter_on_the_tokens_that_it_adds_fits_and_is_described_as_it_lies_there(world, tmp_path):
    from peft import LoraConfig

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"])
    folder = train(tmp_path / "adapter", world.base, config)
    adding_tokens(3)(folder)
    edit_weights(
        folder, lambda ws: {n: torch.ones(4, 100) if "embedding_A" in n else w for n, w in ws.items()}
    )

    _, report = inspect(world, folder, "--lora-extra-vocab-size", "5")

    assert report["reasons"] == []
    loras = [w for n, w in load_file(folder / WEIGHTS).items() if "lora_" in n]
    assert report["parameters"] == sum(weight.numel() for weight in loras)


def test_tokens_that_do_not_fit_are_told_beside_what_else_is_damaged(world, tmp_path):
    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")
    adding_tokens(3, 47)(folder)
    without_b(folder)

    assert_refused(world, folder, [Q0, "not lora_B"], ["input_embeddings", "(3, 47)"], options=EXTRA)


def test_another_value_of_an_option_does_not_admit_the_adapter(world, tmp_path):
    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")
    edit_config(folder, context_length=1000)
    with_a0(torch.full((4, 48), float("nan")))(folder)

    assert_refused(
        world,
        folder,
        [
            "rank 4 is greater than max_lora_rank 3",
            "needs rotary factor 4.0",
            "--long-lora-scaling-factors 2.0,4.0",
        ],
        [f"{Q0}.lora_A holds NaN"],
        options=["--max-lora-rank", "3", "--long-lora-scaling-factors", "2"],
    )


def test_a_pickle_fits_unless_an_option_refuses_it(world, tmp_path):
    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()

    assert inspect(world, folder)[1]["fits"]
    assert_refused(
        world, folder, ["adapter_model.bin", "save it as safetensors"], options=["--refuse-pickles"]
    )


@pytest.mark.parametrize("name", ["qv", "all", "mlp", "patterns"])
def test_good_adapters_fit(world, name):
    text, report = inspect(world, world.path(name))

    assert report["fits"] and report["reasons"] == []
    assert text.splitlines()[-1] == f"fits {world.base}"
    tensors = load_file(world.path(name) / WEIGHTS)
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values())


def test_an_id_that_the_hub_does_not_have_is_named_with_the_reason(world, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    reason = ["the Hugging Face hub did not give it", "HF_HUB_OFFLINE"]
    assert_refused(world, "nobody/nothing", ["adapter folder 'nobody/nothing' does not exist", *reason])


def test_of_a_pickle_a_process_prints_the_verdict_and_nothing_else(world, tmp_path):
    """Of protocol 4, of which torch has something to say besides."""
    folder = shutil.copytree(world.path("qv"), tmp_path / "adapter")
    pickled({A0: Payload()})(folder)

    done = subprocess.run(
        [sys.executable, "-m", "minivllm.cli", "inspect", str(folder), "--model", str(world.base)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MINIVLLM_LABS": ""},
    )

    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout.splitlines()) == 3
    assert not (tmp_path / "ran").exists()
