"""Models and managers whose slots are weighed: tiny ones that are made, and large ones of which only shapes are."""

import dataclasses

from labs.kit.regions import ROOT
from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS
from minivllm.vllm.model_manager import LRUCacheLoRAModelManager
from tests.worlds.models import SIZES, VARIANTS

# Rows of a step that the GPU backends keep tables for, which nobody predicts.
TOKENS, ROWS = 64, 8


def tiny(variant):
    return ModelArchitecture.from_dict({**SIZES, **VARIANTS[variant]})


def large(name, **changes):
    return dataclasses.replace(
        ModelArchitecture.from_folder(ROOT / "benchmarks" / "shapes" / name), **changes
    )


def base_model(architecture, dtype, device="cpu"):
    return MODELS[architecture.architecture](architecture, dtype, device)


def manage(model, lora_config, device="cpu"):
    vocab_size = model.config.vocab_size
    return LRUCacheLoRAModelManager(model, ROWS, TOKENS, vocab_size, lora_config, device)
