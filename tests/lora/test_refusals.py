"""What the engine does not serve: a sentence for each thing that is wrong, before anything changes.

A case for every row: folders that PEFT wrote, and good ones that are damaged. `judge_adapter` says all that is wrong,
a request the first of it.
"""

import re
import shutil

import pytest
import torch

from minivllm import LoRARequest
from tests.worlds.engines import greedy, run, snapshot, tokens_of
from tests.worlds.spoiled_adapters import (
    A0,
    CONFIG,
    PICKLE,
    Q0,
    WEIGHTS,
    Payload,
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
)

PROMPT = [5, 6, 7, 8, 9]


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


# Options of PEFT's LoraConfig -> what is said of what it saves. Of all fields of a config: phase 01's test_peft_helper.
TRAINED = {
    "DoRA": ({"use_dora": True}, ["DoRA (use_dora)", "--enable-dora"]),
    "modules to save": ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "['lm_head']"]),
    "trained tokens": ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices"]),
    "bias all": ({"bias": "all"}, ["bias 'all'", "train with bias='none'"]),
    "PiSSA": ({"init_lora_weights": "pissa"}, ["init_lora_weights 'pissa'", "train with another"]),
    "rank": ({"r": 80}, ["LoRA rank 80 is greater than max_lora_rank 64", "--max-lora-rank 80"]),
    "rank of a pattern": ({"rank_pattern": {"v_proj": 72}}, ["rank 72 is greater", "--max-lora-rank 72"]),
}


@pytest.mark.parametrize("what", TRAINED)
def test_what_peft_trains_and_the_engine_does_not_serve(world, engine, tmp_path, what):
    options, words = TRAINED[what]

    folder = trained_by_peft(tmp_path / what, world.base, target_modules=["q_proj", "v_proj"], **options)

    assert_refused(world, engine, folder, words)


def test_a_config_of_another_rank_than_the_tensors(world, engine, folder):
    edit_config(folder, r=7)

    q_proj = [Q0, "has rank 4", "gives only [7]", "1 more layer)"]
    problems = problems_of(folder, world.base)
    assert_said(problems, q_proj, [Q0.replace("q_proj", "v_proj")])


# What is done to a good folder -> what is said of it. Of files and tensors by themselves: test_bad_adapters.
DAMAGED = {
    "no folder": (shutil.rmtree, ["adapter folder '", "adapter' does not exist"]),
    "weights cut short": (cut_short, [WEIGHTS, "is not a readable safetensors file"]),
    "a pickle that runs code": (
        as_raw_pickle({A0: Payload()}),
        [PICKLE, "damaged or holds more than plain tensors", "save the adapter as safetensors"],
    ),
    "A too wide": (with_a0(4, 49), [Q0, "lora_A (4, 49)", "expected (4, 48)"]),
    "NaN": (with_tensor(A0, torch.full((4, 48), float("nan"))), [f"{Q0}.lora_A holds NaN or Inf"]),
    "names of another model": (
        renamed("q_proj", "query"),
        ["that the model does not offer", f"'{Q0[:-6]}query' (nearest: {Q0}", "layers.1.self_attn.query"],
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


def test_a_rank_that_an_option_admits(world, tmp_path):
    folder = trained_by_peft(tmp_path / "adapter", world.base, r=80)

    assert_said(problems_of(folder, world.base), ["pass --max-lora-rank 80"])
    assert problems_of(folder, world.base, max_lora_rank=80) == []
