"""What the engine does not serve: a sentence for each thing that is wrong, before anything changes.

A case for every row: folders that PEFT wrote, and good ones that are damaged. `judge_adapter` says all that is wrong,
a request the first of it.
"""

import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run, snapshot, tiny_world, tokens_of
from tests.worlds.spoiled_adapters import (
    A0,
    B0,
    CONFIG,
    PICKLE,
    Q0,
    WEIGHTS,
    Payload,
    as_pickle,
    as_raw_pickle,
    assert_said,
    cut_short,
    edit_config,
    edit_weights,
    fill,
    problems_of,
    renamed,
    trained_by_peft,
    with_a0,
    with_tensor,
    without,
    write,
)

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


@pytest.fixture(scope="module")
def engine(world):
    """At work: one request runs, one waits, two adapters are in memory, one of them pinned."""
    engine = world.engine(dtype="float32", max_num_seqs=2, max_lora_rank=64)
    engine.add_lora(world.request("all"))
    engine.pin_lora(2)
    engine.add_request("running", PROMPT, greedy(20), lora_request=world.request("qv"))
    engine.add_request("base", PROMPT, greedy(20))
    engine.add_request("waiting", PROMPT, greedy(4), lora_request=world.request("all"))
    engine.step()
    return engine


@pytest.fixture
def folder(world, tmp_path):
    """A copy of adapter 'qv' to spoil."""
    return shutil.copytree(world.path("qv"), tmp_path / "adapter")


def assert_refused(world, engine, folder, *reasons):
    """A sentence for each of `reasons`, and an engine that says the first of them is as it was."""
    __tracebackhide__ = True
    said, before = problems_of(folder, world.base), snapshot(engine)

    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        engine.add_lora(LoRARequest("bad", 7, str(folder)))

    assert_said(said, *reasons)
    assert_said([str(raised.value)], ["adapter 'bad'", *reasons[0]])
    assert snapshot(engine) == before


# Options of PEFT's LoraConfig -> what is said of what it saves.
TRAINED = {
    "DoRA": ({"use_dora": True}, ["DoRA (use_dora)", "--enable-dora"]),
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
def test_what_peft_trains_and_the_engine_does_not_serve(world, engine, tmp_path, what):
    options, words = TRAINED[what]

    folder = trained_by_peft(tmp_path / what, world.base, target_modules=["q_proj", "v_proj"], **options)

    assert_refused(world, engine, folder, words)


@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING"])
def test_another_kind_of_adapter(world, engine, tmp_path, kind):
    from peft import IA3Config, PromptTuningConfig

    config = (
        IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        if kind == "IA3"
        else PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )

    folder = trained_by_peft(tmp_path / "adapter", world.base, config)

    assert_refused(world, engine, folder, [CONFIG, f"peft_type '{kind}'", "only LORA"])


# A change to the config of a good adapter -> what is said of it.
CONFIGS = {
    "aLoRA without tokens": ({"alora_invocation_tokens": []}, ["alora_invocation_tokens"]),
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
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_is_not_served(world, engine, folder, what):
    changes, words = CONFIGS[what]

    edit_config(folder, **changes)

    assert_refused(world, engine, folder, words)


def test_a_config_of_another_rank_than_the_tensors(world, engine, folder):
    edit_config(folder, r=7)

    q_proj = [Q0, "has rank 4", "gives only [7]", "1 more layer)"]
    problems = problems_of(folder, world.base)
    assert_said(problems, q_proj, [Q0.replace("q_proj", "v_proj")])


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
    "weights cut short": (cut_short, [WEIGHTS, "is not a readable safetensors file"]),
    "weights empty": (write(WEIGHTS, b""), [WEIGHTS, "is not a readable safetensors file"]),
    "weights not fetched": (
        write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
        [WEIGHTS, "is not a readable safetensors file"],
    ),
    "a pickle that runs code": (
        as_raw_pickle({A0: Payload()}),
        [PICKLE, "damaged or holds more than plain tensors", "save the adapter as safetensors"],
    ),
    "a pickle of a list": (as_pickle([1, 2]), [PICKLE, "does not hold a dict of tensors"]),
    "a pickle of numbers": (as_pickle({A0: 1.5}), [PICKLE, A0, "is not a plain tensor"]),
    "no tensors": (lambda f: save_file({}, f / WEIGHTS), ["holds no LoRA weights"]),
    "rank 0": (with_a0(0, 48), [A0, "at least rank 1", "(0, 48)"]),
    "a vector": (with_a0(4), [A0, "must be a matrix", "(4,)"]),
    "A too wide": (with_a0(4, 49), [Q0, "lora_A (4, 49)", "expected (4, 48)"]),
    "A of another rank": (with_a0(5, 48), [Q0, "(5, 48)", "differ in rank"]),
    "A upside down": (with_a0(48, 4), [Q0, "(48, 4)", "differ in rank"]),
    "A of integers": (with_tensor(A0, torch.ones(4, 48, dtype=torch.int8)), [A0, "torch.int8", "float32"]),
    "A of float8": (
        with_tensor(A0, torch.ones(4, 48).to(torch.float8_e4m3fn)),
        [A0, "torch.float8_e4m3fn", "float32"],
    ),
    "NaN": (with_tensor(A0, torch.full((4, 48), float("nan"))), [f"{Q0}.lora_A holds NaN or Inf"]),
    "too large for float32": (
        with_tensor(A0, torch.full((4, 48), 1e200, dtype=torch.float64)),
        [f"{Q0}.lora_A holds NaN or Inf as torch.float32"],
    ),
    "no B": (without(B0), [Q0, "has lora_A but not lora_B"]),
    "a name with and without prefix": (
        with_tensor(f"{Q0}.lora_A.weight", torch.ones(4, 48)),
        ["there twice"],
    ),
    "DoRA in the tensors alone": (
        with_tensor(f"base_model.model.{Q0}.lora_magnitude_vector", torch.ones(48)),
        ["lora_magnitude_vector is unsupported LoRA weight", "train without use_dora"],
    ),
    "trained tokens in the tensors alone": (
        with_tensor("base_model.model.model.embed_tokens.trainable_tokens_delta", torch.ones(2, 48)),
        ["trainable_tokens_delta is unsupported", "train without trainable_token_indices"],
    ),
    "a whole embedding": (
        with_tensor("base_model.model.model.embed_tokens.weight", torch.ones(97, 48)),
        ["embed_tokens.weight is unsupported", "save_embedding_layers=False"],
    ),
    "a bias of the base": (
        with_tensor(f"base_model.model.{Q0}.base_layer.bias", torch.ones(48)),
        ["base_layer.bias is unsupported", "train with bias='none'"],
    ),
    "a layer of the base": (
        with_tensor("base_model.model.model.norm.weight", torch.ones(48)),
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
def test_a_folder_that_is_damaged(world, engine, folder, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    spoil, words = DAMAGED[what]

    spoil(folder)

    assert_refused(world, engine, folder, words)
    assert not (tmp_path / "ran").exists(), "code from a pickle ran"


@pytest.mark.parametrize("what", ["no folder", "weights cut short", "A too wide"])
def test_a_reload_is_refused_as_well_and_the_adapter_stays(engine, folder, what):
    spoil, words = DAMAGED[what]
    engine.add_lora(LoRARequest("bad", 7, str(folder)))
    spoil(folder)
    before = snapshot(engine)

    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words[0])):
        engine.add_lora(LoRARequest("bad", 7, str(folder), load_inplace=True))

    assert snapshot(engine) == before
    engine.remove_lora(7)


def test_who_ran_meanwhile_got_what_they_asked_for(world, engine):
    outputs = run(engine)

    oracle = world.oracle(torch.float32)
    assert tokens_of(outputs["running"]) == oracle.greedy("qv", PROMPT, 20)
    assert tokens_of(outputs["base"]) == oracle.greedy(None, PROMPT, 20)
    assert tokens_of(outputs["waiting"]) == oracle.greedy("all", PROMPT, 4)


class TestAllAtOnce:
    @pytest.fixture
    def folder(self, world, tmp_path):
        return shutil.copytree(world.path("all"), tmp_path / "adapter")

    def test_what_the_config_asks_for_is_listed_beside_a_file_that_cannot_be_read(self, world, folder):
        edit_config(folder, use_dora=True, modules_to_save=["lm_head"], r=100)
        cut_short(folder)

        of_config = ["modules_to_save", "DoRA", "--max-lora-rank 100"]
        assert_said(problems_of(folder, world.base), of_config, [WEIGHTS, "is not a readable"])

    def test_two_files_that_are_missing(self, world, folder):
        (folder / CONFIG).unlink()
        (folder / WEIGHTS).unlink()

        assert_said(problems_of(folder, world.base), [f"no {CONFIG}"], ["no weights file"])

    def test_modules_that_are_wrong_in_different_ways(self, world, folder):
        change = {
            A0: torch.ones(8, 7),
            f"base_model.model.{Q0.replace('q_proj', 'k_proj')}.lora_A.weight": torch.ones(8, 48) * torch.nan,
            "base_model.model.model.layers.0.mlp.expert_proj.lora_A.weight": torch.ones(8, 48),
            "base_model.model.model.layers.0.mlp.expert_proj.lora_B.weight": torch.ones(48, 8),
        }
        edit_weights(folder, lambda weights: {**weights, **change})

        said = problems_of(folder, world.base)

        assert len(said) == 3
        assert "k_proj.lora_A holds NaN" in " | ".join(said)
        assert f"{Q0} has lora_A (8, 7)" in " | ".join(said)
        assert "'model.layers.0.mlp.expert_proj' (nearest: " in " | ".join(said)

    def test_a_rank_that_is_too_high_does_not_hide_what_is_wrong_besides(self, world, folder):
        edit_weights(folder, lambda weights: {n: w * torch.nan if n == A0 else w for n, w in weights.items()})

        assert_said(
            problems_of(folder, world.base, max_lora_rank=4),
            ["rank 8 is greater than max_lora_rank 4", "--max-lora-rank 8"],
            [f"{Q0}.lora_A holds NaN"],
        )

    def test_the_same_in_every_layer_is_said_once(self, world, folder):
        fill(folder, torch.nan)

        said = problems_of(folder, world.base)

        assert len(said) == 7, "one for each linear of a layer"
        assert all("layers.0." in reason and "(and so in 1 more layer)" in reason for reason in said)


def test_what_the_model_passes_over_is_not_held_against_the_adapter(world, folder, monkeypatch):
    from minivllm.models.llama import LlamaForCausalLM

    with_tensor("base_model.model.mtp.layers.0.q_proj.lora_A.weight", torch.ones(2, 2))(folder)
    with_tensor("base_model.model.lm_head.base_layer.weight", torch.ones(97, 48))(folder)
    monkeypatch.setattr(LlamaForCausalLM, "lora_skip_prefixes", ["mtp."], raising=False)

    assert problems_of(folder, world.base) == []

    without(B0)(folder)
    assert_said(problems_of(folder, world.base), [Q0, "has lora_A but not lora_B"])


def test_a_rank_that_an_option_admits(world, tmp_path):
    folder = trained_by_peft(tmp_path / "adapter", world.base, r=80)

    assert_said(problems_of(folder, world.base), ["pass --max-lora-rank 80"])
    assert problems_of(folder, world.base, max_lora_rank=80) == []
