"""Adapters whose names are not the model's: renamed by `hf_to_vllm_mapper`, left out by `lora_skip_prefixes`."""

import json
import shutil
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LoRARequest
from minivllm.models import registry
from minivllm.models.interfaces import WeightsMapper
from minivllm.models.llama import LlamaForCausalLM
from tests.worlds.engines import greedy, run, tokens_of

PROMPT = [5, 6, 7, 8, 9]

# What the checkpoint says -> what the model says.
PIECES = {"backbone.blocks.": "model.layers.", ".attention.query.": ".self_attn.q_proj."}


class RenamedLlama(LlamaForCausalLM):
    """Its checkpoints have names of their own, and a head for speculation that the engine does not run."""

    hf_to_vllm_mapper: ClassVar = WeightsMapper(orig_to_new_substr=PIECES)
    lora_skip_prefixes: ClassVar = ["mtp."]


def as_trained(text: str) -> str:
    for theirs, ours in PIECES.items():
        text = text.replace(ours, theirs)
    return text


@pytest.fixture
def folder(world, tmp_path):
    """Adapter 'patterns' as it would come from the renamed model: tensors, patterns, and the head besides."""
    folder = shutil.copytree(world.path("patterns"), tmp_path / "renamed")
    weights = load_file(folder / "adapter_model.safetensors")
    renamed = {as_trained(name): weight for name, weight in weights.items()}
    assert renamed.keys().isdisjoint(name for name in weights if "q_proj" in name)
    head = {
        "base_model.model.mtp.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(3, 5),
        "base_model.model.mtp.norm.weight": torch.ones(5),
    }
    save_file({**renamed, **head}, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    ranks, alphas = config["rank_pattern"], config["alpha_pattern"]
    config["rank_pattern"] = {"blocks.1.attention.query" if "q_proj" in k else k: v for k, v in ranks.items()}
    config["alpha_pattern"] = {
        "blocks.0.self_attn.k_proj" if "k_proj" in k else k: v for k, v in alphas.items()
    }
    assert config["rank_pattern"] != ranks and config["alpha_pattern"] != alphas
    path.write_text(json.dumps(config))
    return folder


def test_an_adapter_that_needs_both_gets_the_tokens_of_the_one_it_was_renamed_from(
    world, folder, monkeypatch
):
    monkeypatch.setitem(registry.MODELS, "LlamaForCausalLM", RenamedLlama)
    engine, request = world.engine(), LoRARequest("renamed", 7, str(folder))

    for request_id, lora in {"renamed": request, "base": None, "all": world.request("all")}.items():
        engine.add_request(request_id, PROMPT, greedy(), lora_request=lora)

    outputs = run(engine)
    oracle = world.oracle()
    assert tokens_of(outputs["renamed"]) == oracle.greedy("patterns", PROMPT, 8)
    assert tokens_of(outputs["base"]) == oracle.greedy(None, PROMPT, 8)
    assert tokens_of(outputs["all"]) == oracle.greedy("all", PROMPT, 8), "the model's own names stay good"
